"""Held-out loss of AdamW, Muon and its relatives on the example GPT, each tuned by the same procedure.

    python tests/benchmarks/bench_loss.py                             # everything; goes on where it was stopped
    python tests/benchmarks/bench_loss.py --sizes small --stages sweep shorter --seeds 0
    python tests/benchmarks/bench_loss.py --time                      # step times, on a quiet machine

One line per run in records/loss_<size>.jsonl; records/loss_time.jsonl with --time. A run that has its line is
not repeated. `report_loss.py` makes the table and the picture from these lines alone.

Every run is compared at the end of its own schedule, on the same held-out windows. The stages:

    sweep    AdamW: learning rate, weight decay, b2. Muon: learning rate, weight decay, AdamW's share of the rate.
             Coordinate by coordinate with one seed, each until the best value has worse ones on both sides; then
             the learning rate again; then whoever had fewer runs gets as many more, at rates between.
    seeds    the best of each with three seeds
    default  Muon with AdamW's best rate and decay and its own defaults
    shorter  Muon with complete schedules of 1/1.6 and 1/2 of the steps, and 1/3 if 1/2 still beats AdamW
    longer   AdamW with complete schedules of 1.5, 2 and 3 times the steps, until it reaches Muon's loss
    momentum the tuned Muon with its momentum in int8
    peer     optax.contrib.muon, with the labels it chooses and with ours, at three rates each
    recipes  published recipes at three rates each (small size only)
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

import bench_step
import jax
import optax
import record
from flax import nnx
from loss_plan import SEEDS, SIZES, STAGES, Losses, Plan, Run, loss_of

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))
import corpus as corpora
import train_gpt
from gpt import GPT, Config

import optax_muon


def optimizer_of(run: Run, settings: train_gpt.Settings) -> optax.GradientTransformation:
    rate = train_gpt.up_and_down(run.learning_rate, settings)
    adamw_rate = train_gpt.up_and_down(run.learning_rate * run.adamw_multiple, settings)
    # The peer's names. With consistent_rms its update has the size of ours, so the rates compare.
    peer: dict[str, Any] = {
        "weight_decay": run.weight_decay,
        "weight_decay_mask": train_gpt.no_norms,
        "adam_b2": run.b2,
        "adam_weight_decay": run.weight_decay,
        "adam_learning_rate": adamw_rate,
        "consistent_rms": 0.2,
    }
    match run.optimizer:
        case "adamw":
            decayed = {"weight_decay": run.weight_decay, "mask": train_gpt.no_norms}
            rule = optax.adamw(rate, b1=0.9, b2=run.b2, **decayed)
        case "muon" | "muon_int8":
            rule = optax_muon.muon(
                rate,
                weight_decay=run.weight_decay,
                adamw_learning_rate=None if run.adamw_multiple == 1.0 else adamw_rate,
                adamw_b2=run.b2,
                mu_dtype="int8" if run.optimizer == "muon_int8" else None,
            )
        case "contrib":
            rule = optax.contrib.muon(rate, **peer)
        case "contrib_labelled":
            rule = bench_step.contrib_muon(rate, **peer)
        case "modded_nanogpt":  # its AdamW half has its own share of the rate
            rule = optax_muon.recipes.modded_nanogpt(rate, steps=run.steps)
        case recipe:
            rule = getattr(optax_muon.recipes, recipe)(rate, adamw_learning_rate=adamw_rate)
    return optax.chain(optax.clip_by_global_norm(1.0), rule)


def muon_leaves(state: Any) -> list[tuple[str, int]]:
    """Path and size of each matrix that has a momentum in Muon's state, ours or the peer's."""
    is_muon = lambda x: isinstance(x, optax_muon.ScaleByMuonState | optax.contrib.MuonState)
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf.size)
        for node in jax.tree.leaves(state, is_leaf=is_muon)
        if is_muon(node)
        for path, leaf in jax.tree_util.tree_leaves_with_path(node.mu)
    ]


def measure(run: Run, corpus: corpora.Corpus) -> dict[str, Any]:
    """Trains once; the line for the record."""
    size = SIZES[run.size]
    config = Config(width=size.width, layers=size.layers, heads=size.heads)
    settings = train_gpt.Settings(steps=run.steps, seed=run.seed, evaluations=8)
    transformation = optimizer_of(run, settings)
    params = nnx.as_pure(nnx.state(GPT(config, nnx.Rngs(0)), nnx.Param))
    state = jax.eval_shape(transformation.init, params)
    muon = muon_leaves(state)
    hidden = muon_leaves(jax.eval_shape(optax_muon.muon(1.0).init, params))
    start = time.perf_counter()
    result = train_gpt.train(f"{run.size} {label_of(run)}", transformation, corpus, config, settings)
    seconds = time.perf_counter() - start
    jax.clear_caches()  # a sweep compiles a program per run
    every = max(1, run.steps // 40)
    losses = result["train_loss"]
    return {
        "benchmark": "loss",
        "run": dataclasses.asdict(run),
        "final_loss": finite(result["final_loss"]),
        "curve": [[point["step"], finite(point["loss"])] for point in result["curve"]],
        "train_loss": [finite(sum(part) / len(part)) for part in batched(losses, every)],
        "tokens_per_step": settings.sequences * config.context,
        "hidden_parameters": sum(size for _, size in hidden),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "state_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)),
        "muon_matrices": len(muon),
        "muon_example": muon[0][0] if muon else None,
        "seconds": round(seconds, 1),
        "train_seconds": round(result["seconds"], 1),
        "corpus": {"name": corpus.name, "sha256": corpus.sha256},
        "flax": version("flax"),
    }


def label_of(run: Run) -> str:
    changed = [f"{run.optimizer} lr {run.learning_rate:.2g} wd {run.weight_decay:g}"]
    changed += [f"b2 {run.b2:g}"] if run.b2 != 0.95 else []
    changed += [f"adamw x{run.adamw_multiple:.2g}"] if run.adamw_multiple != 1 else []
    return " ".join([*changed, f"seed {run.seed}", f"{run.steps} steps"])


def finite(x: float) -> float | None:
    """JSON has no NaN; a run that diverged says null."""
    return round(x, 6) if math.isfinite(x) else None


def batched(values: Sequence[float], count: int) -> Iterator[Sequence[float]]:
    for i in range(0, len(values), count):
        yield values[i : i + count]


def path_of(size: str) -> pathlib.Path:
    return record.RECORDS / f"loss_{size}.jsonl"


def recorded(size: str, corpus: corpora.Corpus) -> Losses:
    """The losses of the runs that have their line."""
    path, losses = path_of(size), {}
    for row in path.read_text().splitlines() if path.exists() else ():
        line = json.loads(row)
        if line["corpus"]["sha256"] != corpus.sha256:
            raise SystemExit(
                f"{path.name} was made with another corpus ({line['corpus']['name']}), this is {corpus.name}: "
                f"their losses do not compare. Run with the Python of the record, or move the file away."
            )
        losses[Run(**line["run"])] = loss_of(line)
    return losses


def go(
    size: str,
    stages: Sequence[str],
    steps: int,
    corpus: corpora.Corpus,
    *,
    seeds: Sequence[int] = SEEDS,
    at_most: float = math.inf,
) -> int:
    """Runs what is missing of the stages; the number of new runs."""
    losses = recorded(size, corpus)
    plan, new = Plan(size, steps, losses), 0
    for stage in ("sweep", *(stage for stage in stages if stage != "sweep")):
        for run in getattr(plan, stage)():
            if run in losses or run.seed not in seeds:
                continue
            if stage not in stages:
                raise SystemExit(f"{stages[0]} builds on the sweep of {size}, which lacks {label_of(run)}.")
            if new >= at_most:
                return new
            line = measure(run, corpus) | {"stage": stage}
            record.write(f"loss_{size}", [line])
            losses[run] = loss_of(line)
            new += 1
    return new


def measure_times(sizes: Sequence[str], rounds: int) -> None:
    for size in sizes:
        shape = SIZES[size]
        config = Config(width=shape.width, layers=shape.layers, heads=shape.heads)
        sequences = train_gpt.Settings().sequences
        times = record.interleaved(bench_step.candidates(sequences, config), rounds)
        rows = [{"benchmark": "loss_time", "size": size, "case": name, **t} for name, t in times.items()]
        record.write("loss_time", rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=("small", "medium", "large"))
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument(
        "--seeds", nargs="+", type=int, choices=SEEDS, default=SEEDS, help="the sweep has seed 0"
    )
    parser.add_argument("--steps", type=int, help="instead of those of the size")
    parser.add_argument("--at-most", type=int, default=math.inf, metavar="N", help="stop after N new runs")
    parser.add_argument("--time", action="store_true", help="measure step times instead")
    parser.add_argument("--rounds", type=int, default=15, help="of --time")
    arguments = parser.parse_args()
    if arguments.time:
        measure_times(arguments.sizes, arguments.rounds)
        return
    corpus = corpora.load()
    print(corpus)
    new = 0
    for size in arguments.sizes:
        steps = arguments.steps or SIZES[size].steps
        new += go(
            size, arguments.stages, steps, corpus, seeds=arguments.seeds, at_most=arguments.at_most - new
        )
    print(f"{new} new runs")


if __name__ == "__main__":
    main()
