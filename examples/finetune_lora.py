"""Pre-train a small GPT with AdamW and with Muon, then fine-tune both on other text with both, fully and by LoRA.

    python examples/finetune_lora.py              # pre-trains on Python source, fine-tunes on its reference manual

A model that was pre-trained with one optimizer does not always take well to fine-tuning with the other: Moonlight found
AdamW then Muon slightly worse than AdamW throughout. The table at the end measures it here: every cell is the better of
two rates, on held-out text of the new kind, with the loss on the old kind beside it. Writes `<out>/finetune_lora.json`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np
import optax
from corpus import Corpus, batch, fixed_batches, standard_library, text_files
from flax import nnx
from gpt import GPT, Config
from tqdm import tqdm

import optax_muon

NAMES = {"adamw": "AdamW", "muon": "Muon"}
OPTIMIZERS = {
    "adamw": functools.partial(optax.adamw, b1=0.9, b2=0.95, weight_decay=0.1),
    "muon": optax_muon.muon,
}
# With its factor Muon's update has the RMS of AdamW's, so both try the same rates.
RATES = {"full": (5e-4, 2e-3), "lora": (2e-3, 8e-3)}


@dataclasses.dataclass(frozen=True)
class Settings:
    pretrain_steps: int = 200
    steps: int = 60
    pretrain_rate: float = 4e-3
    sequences: int = 16
    rank: int = 8
    eval_batches: int = 8
    seed: int = 0
    rates: int = 2


def add_lora(model: GPT, rank: int, rngs: nnx.Rngs) -> None:
    """Factors a (in, rank) and b (rank, out) beside every query, key and value. b starts at zero."""
    for block in model.blocks:
        for name in ("query", "key", "value"):
            base = getattr(block.attention, name)
            fan_in, fan_out = base.kernel.shape
            setattr(block.attention, name, nnx.LoRA(fan_in, rank, fan_out, base_module=base, rngs=rngs))


def loss_fn(model: GPT, tokens: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:]).mean()


eval_step = nnx.jit(loss_fn)


def held_out(model: GPT, corpus: Corpus, config: Config, settings: Settings) -> float:
    batches = fixed_batches(corpus.valid, settings.eval_batches, settings.sequences, config.context)
    return float(np.mean([float(eval_step(model, jnp.asarray(b))) for b in batches]))


def train(
    model: GPT,
    name: str,
    rate: float,
    steps: int,
    corpus: Corpus,
    config: Config,
    settings: Settings,
    wrt,
    text,
):
    """Trains the variables of type `wrt` in place: a tenth of warm-up, then a linear fall to zero."""
    warmup = max(1, steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, warmup, steps)
    transformation = optax.chain(optax.clip_by_global_norm(1.0), OPTIMIZERS[name](schedule))
    optimizer = nnx.Optimizer(model, transformation, wrt=wrt)

    @nnx.jit
    def step(model, optimizer, tokens):
        loss, gradients = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, wrt))(model, tokens)
        optimizer.update(model, gradients)
        return loss

    for index in tqdm(range(steps), desc=text, unit="step"):
        step(
            model,
            optimizer,
            jnp.asarray(batch(corpus.train, settings.seed, index, settings.sequences, config.context)),
        )


def finetune(pretrained, how: str, name: str, corpora, config: Config, settings: Settings, text: str) -> dict:
    """The best of the rates: held-out loss on the new text, and what is left on the old."""
    runs = []
    for rate in RATES[how][: settings.rates]:
        model = GPT(config, nnx.Rngs(settings.seed))
        nnx.update(model, pretrained)
        if how == "lora":
            add_lora(model, settings.rank, nnx.Rngs(settings.seed))
        wrt = nnx.LoRAParam if how == "lora" else nnx.Param
        new, old = corpora
        train(model, name, rate, settings.steps, new, config, settings, wrt, f"{text}, rate {rate:g}")
        losses = {
            "new": held_out(model, new, config, settings),
            "old": held_out(model, old, config, settings),
        }
        trained = nnx.state(model, wrt)
        labels = jax.tree.leaves(optax_muon.param_labels(trained))
        runs.append({"rate": rate, "muon_leaves": labels.count("muon") if name == "muon" else 0, **losses})
    return min(runs, key=lambda run: run["new"])


def table(results: list[dict]) -> str:
    lines = [
        f"{'pre-trained with':18}{'fine-tuned with':18}{'how':8}{'new text':>10}{'old text':>10}{'rate':>10}"
    ]
    for r in results:
        before = "-" if r["how"] == "none" else NAMES[r["finetuned"]]
        rate = "-" if r["how"] == "none" else f"{r['rate']:g}"
        lines.append(
            f"{NAMES[r['pretrained']]:18}{before:18}{r['how']:8}{r['new']:>10.4f}{r['old']:>10.4f}{rate:>10}"
        )
    return "\n".join(lines)


def caveat(results: list[dict]) -> str:
    """What a change of optimizer cost or gained here, in the numbers of this run."""
    loss = {(r["pretrained"], r["finetuned"], r["how"]): r["new"] for r in results if r["how"] != "none"}
    lines = [
        "Caveat: optimizer mismatch. On the new text, against fine-tuning with the optimizer of the pre-training,"
    ]
    for before, after in (("adamw", "muon"), ("muon", "adamw")):
        parts = [
            f"{loss[before, after, how] - loss[before, before, how]:+.4f} ({how})" for how in ("full", "lora")
        ]
        lines.append(f"  {NAMES[before]} then {NAMES[after]}: {', '.join(parts)} nats per byte")
    lines.append(
        "One seed of a small model: measure it on yours before you change the optimizer of a pre-trained model."
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", nargs="+", metavar="FILE", help="fine-tune on the bytes of these files")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs"), metavar="DIR")
    sizes = {"layers": 3, "width": 128, "heads": 2, "context": 128}
    fields = {f.name: f.default for f in dataclasses.fields(Settings)} | sizes
    for name, default in fields.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, metavar="N")
    arguments = parser.parse_args()
    config = Config(**{name: getattr(arguments, name) for name in sizes})
    settings = Settings(**{f.name: getattr(arguments, f.name) for f in dataclasses.fields(Settings)})
    manual = pathlib.Path(sysconfig.get_paths()["stdlib"]) / "pydoc_data" / "topics.py"
    old, new = standard_library(), text_files(arguments.text or [str(manual)])
    print(f"pre-training {old}\nfine-tuning  {new}\n")

    results = []
    for before in NAMES:
        model = GPT(config, nnx.Rngs(settings.seed))
        steps, rate = settings.pretrain_steps, settings.pretrain_rate
        train(model, before, rate, steps, old, config, settings, nnx.Param, f"pre-training, {NAMES[before]}")
        pretrained = nnx.state(model, nnx.Param)
        losses = {
            "new": held_out(model, new, config, settings),
            "old": held_out(model, old, config, settings),
        }
        results.append({"pretrained": before, "finetuned": before, "how": "none", **losses})
        for how in RATES:
            for after in NAMES:
                text = f"{NAMES[before]} then {NAMES[after]} ({how})"
                best = finetune(pretrained, how, after, (new, old), config, settings, text)
                results.append({"pretrained": before, "finetuned": after, "how": how, **best})
    print(f"\nheld-out loss, nats per byte\n{table(results)}\n\n{caveat(results)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    record = {"settings": dataclasses.asdict(settings), "sizes": sizes, "rates": RATES, "results": results}
    (arguments.out / "finetune_lora.json").write_text(json.dumps(record, indent=1))
    print(f"\nwrote {arguments.out / 'finetune_lora.json'}")


if __name__ == "__main__":
    main()
