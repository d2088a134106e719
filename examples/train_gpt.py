"""Train a small GPT with Muon and with AdamW on the standard library's own source, and compare the two.

    python examples/train_gpt.py                            # both optimizers, under 5 minutes on 2 CPU cores
    python examples/train_gpt.py --text my_novel.txt --steps 1000
    python examples/train_gpt.py --tokens train.bin --width 384 --layers 6 --heads 6

Writes `<out>/train_gpt.json` (everything the picture shows, with versions and the hash of the corpus) and
`<out>/train_gpt.png`. The one line to take away is in `make_optimizer`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import os
import pathlib
import platform
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from corpus import Corpus, batch, fixed_batches, load
from flax import nnx
from gpt import GPT, Config
from tqdm import tqdm

import optax_muon

# From three rates each, by the held-out loss after 300 steps with seed 0: AdamW 1.511 at 2e-3 (on half of the held-out
# windows), 1.488 at 3e-3, 1.555 at 4e-3; Muon 1.445 at 2e-3, 1.363 at 4e-3, 1.344 at 6e-3. AdamW's best lies inside
# its range; Muon's may lie above its own. Again, for more rates:
#   for rate in 2e-3 3e-3 4e-3 6e-3 8e-3; do
#     python examples/train_gpt.py --learning-rate $rate --out runs/rate-$rate
#   done
LEARNING_RATE = {"adamw": 3e-3, "muon": 6e-3}
NAMES = {"adamw": "AdamW", "muon": "Muon"}
COLORS = {"adamw": "#c2571a", "muon": "#2a62b0"}
WEIGHT_DECAY = 0.1


@dataclasses.dataclass(frozen=True)
class Settings:
    steps: int = 300
    sequences: int = 32
    warmup: float = 0.1
    seed: int = 0
    evaluations: int = 15
    eval_batches: int = 10


def up_and_down(learning_rate: float, settings: Settings) -> optax.Schedule:
    """Rises linearly over the warm-up and falls linearly to zero."""
    warmup = int(settings.warmup * settings.steps)
    rise = optax.linear_schedule(0.0, learning_rate, warmup)
    fall = optax.linear_schedule(learning_rate, 0.0, settings.steps - warmup)
    return optax.join_schedules([rise, fall], [warmup])


# The norms, which are not decayed, are the only vectors of the model.
no_norms = functools.partial(jax.tree.map, lambda leaf: leaf.ndim > 1)


def make_optimizer(name: str, learning_rate: float, settings: Settings) -> optax.GradientTransformation:
    """Schedule, clipping and weight decay are the same."""
    schedule = up_and_down(learning_rate, settings)
    if name == "muon":
        rule = optax_muon.muon(schedule)
    else:
        rule = optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=WEIGHT_DECAY, mask=no_norms)
    return optax.chain(optax.clip_by_global_norm(1.0), rule)


def loss_fn(model: GPT, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of the next token, in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:]).mean()


@functools.partial(nnx.jit, donate_argnums=(0, 1))
def train_step(model: GPT, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    loss, gradients = nnx.value_and_grad(loss_fn)(model, tokens)
    optimizer.update(model, gradients)
    return loss


eval_step = nnx.jit(loss_fn)


def evaluate(model: GPT, corpus: Corpus, config: Config, settings: Settings) -> float:
    batches = fixed_batches(corpus.valid, settings.eval_batches, settings.sequences, config.context)
    return float(np.mean([float(eval_step(model, jnp.asarray(tokens))) for tokens in batches]))


def train(name: str, transformation, corpus: Corpus, config: Config, settings: Settings) -> dict:
    """One run, as data. Its seconds count training alone: no evaluation, no first step (it compiles)."""
    model = GPT(config, nnx.Rngs(settings.seed))
    optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)
    seconds, train_loss, curve = 0.0, [], []
    every = max(1, settings.steps // settings.evaluations)
    size = settings.sequences * config.context
    progress = tqdm(range(1, settings.steps + 1), desc=NAMES.get(name, name), unit="step")
    for step in progress:
        tokens = jnp.asarray(batch(corpus.train, settings.seed, step, settings.sequences, config.context))
        start = time.perf_counter()
        train_loss.append(float(train_step(model, optimizer, tokens)))
        if step > 1:
            seconds += time.perf_counter() - start
        if step % every == 0 or step == settings.steps:
            curve.append(
                {"step": step, "seconds": seconds, "loss": evaluate(model, corpus, config, settings)}
            )
        rate = size * (step - 1) / seconds if seconds else 0
        valid = f"{curve[-1]['loss']:.3f}" if curve else "-"
        progress.set_postfix_str(f"loss {train_loss[-1]:.3f}, held out {valid}, {rate:,.0f} tokens/s")
    return {
        "final_loss": curve[-1]["loss"],
        "seconds": seconds,
        "tokens_per_second": rate,
        "curve": curve,
        "train_loss": train_loss,
    }


def reached(run: dict, loss: float) -> dict | None:
    """Where the run's held-out curve first falls to `loss`, between two evaluations by a straight line."""
    previous = None
    for point in run["curve"]:
        if point["loss"] <= loss:
            if previous is None:
                return {"steps": point["step"], "seconds": point["seconds"]}
            part = (previous["loss"] - loss) / (previous["loss"] - point["loss"])
            return {
                "steps": previous["step"] + part * (point["step"] - previous["step"]),
                "seconds": previous["seconds"] + part * (point["seconds"] - previous["seconds"]),
            }
        previous = point
    return None


def table(runs: dict) -> str:
    target = runs.get("adamw", next(iter(runs.values())))["final_loss"]
    heads = ("held-out loss", f"steps to {target:.3f}", f"seconds to {target:.3f}", "tokens/s")
    lines = [" " * 8 + "".join(f"{head:>20}" for head in heads)]
    for name, run in runs.items():
        point = reached(run, target)
        steps, seconds = (
            (f"{point['steps']:.0f}", f"{point['seconds']:.1f}") if point else ("not reached",) * 2
        )
        values = (f"{run['final_loss']:.3f}", steps, seconds, f"{run['tokens_per_second']:,.0f}")
        lines.append(f"{NAMES[name]:8}" + "".join(f"{value:>20}" for value in values))
    return "\n".join(lines)


def plot(record: dict, path: pathlib.Path) -> None:
    """Both held-out curves on the same axes, over steps and over seconds of training."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = record["runs"]
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
    for axis, key, label in zip(
        axes, ("step", "seconds"), ("training step", "seconds of training"), strict=True
    ):
        for name, run in runs.items():
            x, y = ([point[field] for point in run["curve"]] for field in (key, "loss"))
            text = f"{NAMES[name]}, {y[-1]:.3f} at the end"
            axis.plot(x, y, color=COLORS[name], marker="o", markersize=3, label=text)
        if len(runs) == 2:
            mark_crossing(axis, runs, key)
        axis.set_xlabel(label)
        axis.set_xlim(left=0)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    # The fall from the untrained loss would leave no room for the rest.
    losses = [point["loss"] for run in runs.values() for point in run["curve"]]
    lowest, highest = min(losses), max(run["curve"][len(run["curve"]) // 10]["loss"] for run in runs.values())
    axes[0].set_ylim(lowest - 0.06 * (highest - lowest), highest + 0.06 * (highest - lowest))
    unit = "byte" if record["config"]["vocab"] == 256 else "token"
    axes[0].set_ylabel(f"held-out loss, nats per {unit}")
    axes[0].legend(frameon=False, loc="upper right")
    hidden = record["parameters"]["muon"]
    figure.suptitle(
        f"GPT with {hidden / 1e6:.2f}M hidden parameters, {record['corpus']['name']}", fontsize=11
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def mark_crossing(axis, runs: dict, key: str) -> None:
    """Where Muon's curve passes AdamW's final loss, as a part of AdamW's whole run."""
    target, end = runs["adamw"]["final_loss"], runs["adamw"]["curve"][-1][key]
    point = reached(runs["muon"], target)
    if point is None:
        return
    x = point["steps" if key == "step" else "seconds"]
    axis.axhline(target, color=COLORS["adamw"], linestyle=":", linewidth=1.2, zorder=0)
    axis.plot([x], [target], color=COLORS["muon"], marker="o", markersize=9, markerfacecolor="none")
    what = "steps" if key == "step" else "time"
    text = f"AdamW's final loss\nafter {x / end:.0%} of its {what}"
    arrow = {"arrowstyle": "-", "color": "0.5", "shrinkB": 5}
    axis.annotate(text, (x, target), (0.08, 0.06), textcoords="axes fraction", arrowprops=arrow, fontsize=9)


def environment() -> dict:
    packages = ("jax", "jaxlib", "flax", "optax", "optax_muon", "numpy")
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # a checkout on the path, not installed
            versions[package] = "checkout"
    machine = {
        "backend": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "cpus": os.cpu_count(),
    }
    return {"versions": versions, "machine": machine | {"platform": platform.platform()}}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--optimizer", choices=("muon", "adamw", "both"), default="both")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--text", nargs="+", default=(), metavar="FILE", help="train on the bytes of these files"
    )
    source.add_argument(
        "--tokens", metavar="FILE", help="train on uint16 tokens, as nanoGPT's prepare.py writes them"
    )
    parser.add_argument(
        "--learning-rate", type=float, help="of the optimizers that run; the tuned one by default"
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs"), metavar="DIR")
    for field in (*dataclasses.fields(Settings), *dataclasses.fields(Config)):
        if field.name not in ("vocab", "residual"):
            kind = type(field.default)
            parser.add_argument(
                f"--{field.name.replace('_', '-')}", type=kind, default=field.default, metavar="N"
            )
    return parser.parse_args(arguments)


def chosen(cls, arguments: argparse.Namespace, **more):
    """A dataclass filled from the arguments of the same names."""
    return cls(
        **{f.name: getattr(arguments, f.name) for f in dataclasses.fields(cls) if f.name not in more}, **more
    )


def main() -> None:
    arguments = parse()
    corpus = load(arguments.text, arguments.tokens)
    config, settings = (
        chosen(Config, arguments, vocab=corpus.vocab, residual=None),
        chosen(Settings, arguments),
    )
    names = ("adamw", "muon") if arguments.optimizer == "both" else (arguments.optimizer,)

    params = nnx.state(GPT(config, nnx.Rngs(settings.seed)), nnx.Param)
    print(optax_muon.describe(params))
    print(f"\n{corpus}\n")
    sizes = {"muon": 0, "adamw": 0}
    labels = optax_muon.param_labels(params)
    for leaf, label in zip(jax.tree.leaves(params), jax.tree.leaves(labels), strict=True):
        sizes[label] += leaf.size

    runs = {}
    for name in names:
        learning_rate = arguments.learning_rate or LEARNING_RATE[name]
        transformation = make_optimizer(name, learning_rate, settings)
        runs[name] = train(name, transformation, corpus, config, settings) | {"learning_rate": learning_rate}
    print(f"\n{table(runs)}")

    record = {
        "config": {k: v for k, v in dataclasses.asdict(config).items() if k != "residual"},
        "settings": dataclasses.asdict(settings),
        "weight_decay": WEIGHT_DECAY,
        "corpus": {
            "name": corpus.name,
            "sha256": corpus.sha256,
            "train": len(corpus.train),
            "valid": len(corpus.valid),
        },
        "parameters": sizes,
        **environment(),
        "runs": runs,
    }
    if len(runs) == 2:
        record["muon_reaches_adamw"] = reached(runs["muon"], runs["adamw"]["final_loss"])
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "train_gpt.json").write_text(json.dumps(record, indent=1))
    plot(record, arguments.out / "train_gpt.png")
    print(f"\nwrote {arguments.out / 'train_gpt.json'} and {arguments.out / 'train_gpt.png'}")


if __name__ == "__main__":
    main()
