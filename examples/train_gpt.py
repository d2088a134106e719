"""Train a small GPT with Muon and with AdamW on the standard library's own source, and compare the two.

    python examples/train_gpt.py                                   # both optimizers, under 5 minutes on 2 CPU cores
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

LEARNING_RATE = {"adamw": 4e-3, "muon": 4e-3}
NAMES = {"adamw": "AdamW", "muon": "Muon"}
COLORS = {"adamw": "#c2571a", "muon": "#2a62b0"}
WEIGHT_DECAY = 0.1


@dataclasses.dataclass(frozen=True)
class Settings:
    steps: int = 300
    sequences: int = 32
    warmup: float = 0.1
    seed: int = 0
    evaluations: int = 20
    eval_batches: int = 16


def make_optimizer(name: str, learning_rate: float, settings: Settings) -> optax.GradientTransformation:
    """Both rise linearly over the warm-up and fall linearly to zero, clipped alike, with the same weight decay."""
    warmup = int(settings.warmup * settings.steps)
    rise = optax.linear_schedule(0.0, learning_rate, warmup)
    fall = optax.linear_schedule(learning_rate, 0.0, settings.steps - warmup)
    schedule = optax.join_schedules([rise, fall], [warmup])
    if name == "muon":
        rule = optax_muon.muon(schedule)
    else:
        no_norms = functools.partial(jax.tree.map, lambda leaf: leaf.ndim > 1)
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
    """One run, as data. Its seconds count training alone: no evaluation, and not the first step, which compiles."""
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
            curve.append({"step": step, "seconds": seconds, "loss": evaluate(model, corpus, config, settings)})
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
    lines = [f"{'':8}{'held-out loss':>15}{f'steps to {target:.3f}':>18}{f'seconds to {target:.3f}':>20}{'tokens/s':>12}"]
    for name, run in runs.items():
        point = reached(run, target)
        steps, seconds = (f"{point['steps']:.0f}", f"{point['seconds']:.1f}") if point else ("not reached",) * 2
        lines.append(
            f"{NAMES[name]:8}{run['final_loss']:>15.3f}{steps:>18}{seconds:>20}{run['tokens_per_second']:>12,.0f}"
        )
    return "\n".join(lines)
