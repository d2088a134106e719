"""Train a small mixture-of-experts GPT with AdamW and with the Kimi K2 recipe, QK-clip on, and compare the two.

    python examples/train_moe.py                            # one seed, a few minutes on 2 CPU cores
    python examples/train_moe.py --seeds 0 1 2              # the numbers of the README

Kimi K2 clips at 100, where a model of this size never comes; `--threshold` is lower here so that the clip is seen
to act. Writes `<out>/train_moe.json` and `<out>/train_moe.png`: held-out loss, the RMS of the update of every expert,
and the largest attention logits.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from corpus import Corpus, batch, fixed_batches, load
from flax import nnx
from moe import Config, MaxLogits, MoE
from tqdm import tqdm

import optax_muon

# The best of 1e-3, 2e-3, 4e-3, 8e-3 for both and 1.6e-2 for Muon, by the held-out loss of seed 0: AdamW 2.017, 1.864,
# 1.813, 1.861; Kimi K2's recipe 2.240, 2.048, 1.770, 1.611, 1.584. Its best lies at the edge of what was tried.
LEARNING_RATE = {"adamw": 4e-3, "kimi_k2": 1.6e-2}
NAMES = {"adamw": "AdamW", "kimi_k2": "Kimi K2's MuonClip"}
COLORS = {"adamw": "#c2571a", "kimi_k2": "#2a62b0"}
BALANCE = 0.01


@dataclasses.dataclass(frozen=True)
class Settings:
    steps: int = 250
    sequences: int = 16
    warmup: float = 0.1
    threshold: float = 10.0
    evaluations: int = 10
    eval_batches: int = 10


def make_optimizer(name: str, learning_rate: float, settings: Settings, config: Config):
    """Warm-up, a long plateau and a linear fall, as Kimi K2's WSD; clipping of gradients and decay are the same."""
    warmup, fall = int(settings.warmup * settings.steps), int(0.4 * settings.steps)
    schedule = optax.join_schedules(
        [
            optax.linear_schedule(0.0, learning_rate, warmup),
            optax.constant_schedule(learning_rate),
            optax.linear_schedule(learning_rate, 0.1 * learning_rate, fall),
        ],
        [warmup, settings.steps - fall],
    )
    clip = optax.clip_by_global_norm(1.0)
    if name == "adamw":
        return optax.chain(clip, optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.1))
    attention = optax_muon.MultiLatent(nope=config.nope, rope=config.rope, value=config.value)
    qk_clip = optax_muon.qk_clip_transform(threshold=settings.threshold, attention=attention)
    return optax.chain(clip, optax_muon.recipes.kimi_k2(schedule), qk_clip)


def loss_fn(model: MoE, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits, balance = model(tokens[:, :-1])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
    return loss + BALANCE * balance, loss


@functools.partial(nnx.jit, donate_argnums=(0, 1))
def train_step(model: MoE, optimizer: nnx.Optimizer, tokens: jax.Array) -> tuple[jax.Array, ...]:
    """Loss, the RMS of each expert's update [layers, experts], the largest logits [layers, heads]."""
    (_, loss), gradients = nnx.value_and_grad(loss_fn, has_aux=True)(model, tokens)
    before = [block.mlp.experts.up[...] for block in model.blocks]
    logits = nnx.state(model, MaxLogits)
    optimizer.update(model, gradients, max_logits=logits)
    after = [block.mlp.experts.up[...] for block in model.blocks]
    moved = jnp.stack([jnp.sqrt(jnp.mean((b - a) ** 2, (1, 2))) for a, b in zip(before, after, strict=True)])
    return loss, moved, jnp.stack(jax.tree.leaves(logits))


eval_step = nnx.jit(lambda model, tokens: loss_fn(model, tokens)[1])


def train(name: str, rate: float, seed: int, corpus: Corpus, config: Config, settings: Settings) -> dict:
    """One run, as data."""
    model = MoE(config, nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, make_optimizer(name, rate, settings, config), wrt=nnx.Param)
    held_out = list(fixed_batches(corpus.valid, settings.eval_batches, settings.sequences, config.context))
    every = max(1, settings.steps // settings.evaluations)
    run = {"learning_rate": rate, "seed": seed, "curve": [], "update_rms": [], "max_logits": []}
    start = time.perf_counter()
    progress = tqdm(range(1, settings.steps + 1), desc=f"{NAMES[name]}, seed {seed}", unit="step")
    for step in progress:
        tokens = jnp.asarray(batch(corpus.train, seed, step, settings.sequences, config.context))
        loss, moved, logits = train_step(model, optimizer, tokens)
        run["update_rms"].append(np.asarray(moved).tolist())
        run["max_logits"].append(np.asarray(logits).tolist())
        if step % every == 0 or step == settings.steps:
            mean = float(np.mean([float(eval_step(model, jnp.asarray(b))) for b in held_out]))
            run["curve"].append({"step": step, "loss": mean})
        shown = f"{run['curve'][-1]['loss']:.3f}" if run["curve"] else "-"
        progress.set_postfix_str(f"loss {float(loss):.3f}, held out {shown}, max logit {logits.max():.1f}")
    return run | {"final_loss": run["curve"][-1]["loss"], "seconds": time.perf_counter() - start}


def table(runs: dict[str, list[dict]]) -> str:
    lines = [f"{'':20}{'held-out loss, by seed':>36}{'mean':>9}{'spread of experts':>20}{'max logit':>11}"]
    for name, several in runs.items():
        losses = [run["final_loss"] for run in several]
        middle = np.asarray([run["update_rms"][len(run["update_rms"]) // 2] for run in several])
        spread = float(np.mean(middle.max(-1) / middle.min(-1)))
        seeds = " ".join(f"{loss:.4f}" for loss in losses)
        largest = max(np.max(run["max_logits"]) for run in several)
        lines.append(f"{NAMES[name]:20}{seeds:>36}{np.mean(losses):>9.4f}{spread:>19.2f}x{largest:>11.1f}")
    return "\n".join(lines)


def plot(runs: dict[str, list[dict]], settings: Settings, path: pathlib.Path) -> None:
    """Held-out loss, update RMS expert by expert, and the largest logit, for the first seed (loss: all seeds)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for name, several in runs.items():
        first, color = several[0], COLORS[name]
        for run in several:
            x, y = zip(*((p["step"], p["loss"]) for p in run["curve"]), strict=True)
            axes[0].plot(x, y, color=color, label=f"{NAMES[name]}, {y[-1]:.3f}" if run is first else None)
        steps = np.arange(1, len(first["update_rms"]) + 1)
        experts = np.asarray(first["update_rms"]).reshape(len(steps), -1)
        axes[1].plot(steps, experts, color=color, linewidth=0.5, alpha=0.4)
        axes[1].plot(steps, np.median(experts, 1), color=color, linewidth=1.8, label=f"{NAMES[name]}, median")
        largest = np.asarray(first["max_logits"]).max((1, 2))
        axes[2].plot(steps, largest, color=color, label=NAMES[name])
    axes[2].axhline(
        settings.threshold, color="0.3", linestyle="--", linewidth=1, label="threshold of QK-clip"
    )
    axes[1].set_yscale("log")
    titles = (
        "held-out loss, nats per byte",
        "RMS of the update, every expert's up matrix",
        "largest attention logit",
    )
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("training step")
        axis.legend(frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--optimizers", nargs="+", choices=tuple(NAMES), default=tuple(NAMES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="N")
    parser.add_argument("--learning-rate", type=float, help="of both; the tuned ones by default")
    parser.add_argument(
        "--text", nargs="+", default=(), metavar="FILE", help="train on the bytes of these files"
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs"), metavar="DIR")
    for field in (*dataclasses.fields(Settings), *dataclasses.fields(Config)):
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(flag, type=type(field.default), default=field.default, metavar="N")
    arguments = parser.parse_args()
    corpus = load(arguments.text)
    arguments.vocab = corpus.vocab
    config, settings = (
        cls(**{f.name: getattr(arguments, f.name) for f in dataclasses.fields(cls)})
        for cls in (Config, Settings)
    )
    print(optax_muon.describe(nnx.state(MoE(config, nnx.Rngs(0)), nnx.Param)))
    print(f"\n{corpus}\n")
    runs = {
        name: [
            train(name, arguments.learning_rate or LEARNING_RATE[name], seed, corpus, config, settings)
            for seed in arguments.seeds
        ]
        for name in arguments.optimizers
    }
    print(f"\n{table(runs)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    record = {"config": dataclasses.asdict(config), "settings": dataclasses.asdict(settings), "runs": runs}
    record["corpus"] = {"name": corpus.name, "sha256": corpus.sha256}
    record["versions"] = {"jax": jax.__version__, "optax": optax.__version__}
    (arguments.out / "train_moe.json").write_text(json.dumps(record))
    plot(runs, settings, arguments.out / "train_moe.png")
    print(f"\nwrote {arguments.out / 'train_moe.json'} and {arguments.out / 'train_moe.png'}")


if __name__ == "__main__":
    main()
