"""What `bench_loss.py` runs and `report_loss.py` reads: sizes, runs, and how the next run follows from the losses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

SEEDS = (0, 1, 2)
LADDERS: dict[str, tuple[float, ...]] = {
    "learning_rate": tuple(1e-3 * 2.0**k for k in range(-4, 8)),
    "weight_decay": (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
    "b2": (0.9, 0.95, 0.99, 0.999),
    "adamw_multiple": (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0),
}
# The learning rate again at the end, because the best one moves with the decay.
COORDINATES = {
    "adamw": ("learning_rate", "weight_decay", "b2", "learning_rate"),
    "muon": ("learning_rate", "weight_decay", "adamw_multiple", "learning_rate"),
}
PEERS = ("contrib", "contrib_labelled")
# Kimi K2 without QK-clip is Moonlight number for number, so one run stands for both.
RECIPES = ("moonlight", "deepseek_v4", "keller", "dion", "modded_nanogpt")
# Their factor is 1 on a square matrix where ours is 0.2 sqrt(width), so their rate is that much larger for the
# same first update; the AdamW half keeps its own.
UNIT_FACTOR = ("keller", "dion", "modded_nanogpt")


@dataclasses.dataclass(frozen=True)
class Size:
    width: int
    layers: int
    heads: int
    steps: int
    start: float = 4e-3  # the first learning rate that is tried, for both


SIZES = {
    "toy": Size(width=16, layers=1, heads=1, steps=4),
    "small": Size(width=128, layers=4, heads=2, steps=400),
    "medium": Size(width=256, layers=4, heads=4, steps=200),
    "large": Size(width=384, layers=6, heads=6, steps=200, start=2e-3),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run depends on, beside the corpus and this file; a line of the record is known by it."""

    size: str
    optimizer: str  # 'adamw', 'muon', 'muon_int8' (its momentum), one of PEERS or of RECIPES
    steps: int
    learning_rate: float = 4e-3
    weight_decay: float = 0.1  # of AdamW, Muon and the peers; recipes bring their own
    b2: float = 0.95  # of AdamW and of the AdamW half of the others
    adamw_multiple: float = 1.0  # the AdamW half's rate over Muon's
    seed: int = 0


Losses = dict[Run, float]  # infinite where a run diverged


def loss_of(line: Mapping[str, Any]) -> float:
    """The final loss of a line of the record, which has null for a run that diverged."""
    return math.inf if line["final_loss"] is None else line["final_loss"]


def as_adamw(adamw: Run) -> Run:
    """Muon with the rate and decay of a run of AdamW and its own defaults."""
    rate, decay = adamw.learning_rate, adamw.weight_decay
    return Run(adamw.size, "muon", adamw.steps, learning_rate=rate, weight_decay=decay)


def in_int8(muon: Run) -> Run:
    """A run of Muon with its momentum in int8."""
    return dataclasses.replace(muon, optimizer="muon_int8")


def climb(base: Run, field: str, losses: Losses) -> Iterator[Run]:
    """Runs along one coordinate from the value of `base`, until the best has tried neighbours on both sides."""
    ladder = LADDERS[field]
    at = lambda i: dataclasses.replace(base, **{field: ladder[i]})
    tried = {ladder.index(getattr(base, field))}
    yield base
    while True:
        best = min(tried, key=lambda i: losses[at(i)])
        missing = [i for i in (best + 1, best - 1) if i not in tried and 0 <= i < len(ladder)]
        if not missing:
            return
        tried.add(missing[0])
        yield at(missing[0])


def best(runs: Sequence[Run], losses: Losses) -> Run:
    return min(runs, key=lambda run: losses[run])


def between(run: Run) -> Iterator[Run]:
    """Rates around the best that lie between those of the ladder, nearest first."""
    for k in (1, -1, 2, -2, 3, -3, 5, -5, 6, -6):
        yield dataclasses.replace(run, learning_rate=run.learning_rate * 2 ** (k / 4))


@dataclasses.dataclass
class Plan:
    """The runs of one size, stage by stage; what comes next depends on the losses so far."""

    size: str
    steps: int
    losses: Losses
    swept: dict[str, list[Run]] = dataclasses.field(default_factory=dict)

    def sweep(self) -> Iterator[Run]:
        for name, coordinates in COORDINATES.items():
            runs = self.swept[name] = [Run(self.size, name, self.steps, learning_rate=SIZES[self.size].start)]
            for field in coordinates:
                start = runs[0] if len(runs) == 1 else best(runs, self.losses)
                for run in climb(start, field, self.losses):
                    if run not in runs:
                        runs.append(run)
                    yield run
        budget = max(map(len, self.swept.values()))
        for runs in self.swept.values():
            more = between(best(runs, self.losses))
            while len(runs) < budget:
                run = next(more)
                if run not in runs:
                    runs.append(run)
                    yield run

    def tuned(self, name: str) -> Run:
        return best(self.swept[name], self.losses)

    def with_seeds(self, run: Run) -> Iterator[Run]:
        for seed in SEEDS:
            yield dataclasses.replace(run, seed=seed)

    def seeds(self) -> Iterator[Run]:
        for name in COORDINATES:
            yield from self.with_seeds(self.tuned(name))

    def default(self) -> Iterator[Run]:
        yield from self.with_seeds(as_adamw(self.tuned("adamw")))

    def momentum(self) -> Iterator[Run]:
        yield from self.with_seeds(in_int8(self.tuned("muon")))

    def shorter(self) -> Iterator[Run]:
        muon, goal = self.tuned("muon"), self.losses[self.tuned("adamw")]
        for part in (1.6, 2.0, 3.0):
            run = dataclasses.replace(muon, steps=round(self.steps / part))
            yield from self.with_seeds(run)
            if part >= 2.0 and self.losses[run] > goal:
                break

    def longer(self) -> Iterator[Run]:
        adamw, goal = self.tuned("adamw"), self.losses[self.tuned("muon")]
        needed = []
        for times in (1.5, 2.0, 3.0):
            needed.append(dataclasses.replace(adamw, steps=round(self.steps * times)))
            yield needed[-1]
            if self.losses[needed[-1]] <= goal:
                break
        for run in needed:
            yield from self.with_seeds(run)

    def peer(self) -> Iterator[Run]:
        for name in PEERS:
            for times in (1.0, 2.0, 0.5):
                ours = self.tuned("muon")
                rate = ours.learning_rate * times
                yield dataclasses.replace(ours, optimizer=name, learning_rate=rate)

    def recipes(self) -> Iterator[Run]:
        if self.size not in ("toy", "small"):
            return
        muon = self.tuned("muon")
        ours = Run(self.size, "muon", self.steps, muon.learning_rate, adamw_multiple=muon.adamw_multiple)
        for name in RECIPES:
            factor = 0.2 * math.sqrt(SIZES[self.size].width) if name in UNIT_FACTOR else 1.0
            for times in (1.0, 2.0, 0.5):
                yield dataclasses.replace(
                    ours,
                    optimizer=name,
                    learning_rate=ours.learning_rate * factor * times,
                    # AdamW's rate stays while a unit-factor recipe's is varied.
                    adamw_multiple=ours.adamw_multiple / (factor * times if factor != 1.0 else 1.0),
                )


STAGES = ("sweep", "seeds", "default", "shorter", "longer", "momentum", "peer", "recipes")
