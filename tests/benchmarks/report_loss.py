"""The table and the picture of `bench_loss.py`, from its JSON lines alone. Says what is missing.

python tests/benchmarks/report_loss.py                            # prints the table
python tests/benchmarks/report_loss.py --picture tests/benchmarks/records/loss.png --readme README.md
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from loss_plan import PEERS, RECIPES, SEEDS, SIZES, Plan, Run, as_adamw, in_int8, loss_of

RECORDS = pathlib.Path(__file__).parent / "records"
BEGIN, END = "<!-- evidence -->", "<!-- end of evidence -->"
TARGET = 1.6
NOT_RUN = "not run"
Line = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Ratio:
    """AdamW's steps over Muon's at equal final loss; with `bound` the schedules that ran only bound it."""

    value: float
    bound: str = ""  # '', '>' or '<'


class Evidence:
    """The runs of one size and what follows from them."""

    def __init__(self, size: str, lines: Sequence[Line], times: Mapping[str, float]):
        self.size, self.steps, self.times = size, SIZES[size].steps, times
        self.lines = {Run(**line["run"]): line for line in lines}
        self.losses = {run: loss_of(line) for run, line in self.lines.items()}
        self.plan = Plan(size, self.steps, self.losses)
        self.swept = all(run in self.losses for run in self._until_missing())

    def _until_missing(self):
        """The sweep as far as it went; what follows a missing run is not known yet."""
        for run in self.plan.sweep():
            yield run
            if run not in self.losses:
                return

    def sweep_of(self, name: str) -> list[Run]:
        return [run for run in self.plan.swept.get(name, ()) if run in self.losses]

    def tuned(self, name: str) -> Run | None:
        return min(self.sweep_of(name), key=self.losses.__getitem__, default=None)

    def default_run(self) -> Run | None:
        """Muon with AdamW's tuned rate and decay and nothing else."""
        adamw = self.tuned("adamw")
        return adamw and as_adamw(adamw)

    def in_int8(self) -> Run | None:
        muon = self.tuned("muon")
        return muon and in_int8(muon)

    def seeds_of(self, run: Run | None) -> dict[int, float]:
        """Seed -> final loss of the runs that differ from `run` in the seed alone."""
        same = {seed: dataclasses.replace(run, seed=seed) for seed in SEEDS} if run else {}
        return {seed: self.losses[key] for seed, key in same.items() if key in self.losses}

    def schedules(self, name: str, seed: int) -> list[tuple[int, float]]:
        """(steps, final loss) of the tuned optimizer's complete schedules with this seed."""
        if (tuned := self.tuned(name)) is None:
            return []
        same = [run for run in self.lines if dataclasses.replace(tuned, seed=seed, steps=run.steps) == run]
        return sorted((run.steps, self.losses[run]) for run in same)

    def ratios(self, varied: str) -> list[Ratio]:
        """AdamW's steps over Muon's, one for each seed in which both ran and `varied` ran at several lengths.

        The other optimizer's run at full length sets the loss.
        """
        fixed = "muon" if varied == "adamw" else "adamw"
        goals, out = self.seeds_of(self.tuned(fixed)), []
        for seed, goal in goals.items():
            points = self.schedules(varied, seed)
            if len(points) > 1:
                steps, bound = steps_to(points, goal)
                value = steps / self.steps if varied == "adamw" else self.steps / steps
                # Steps that are only bounded from below bound AdamW's ratio from below and Muon's from above.
                flipped = {"": "", ">": "<", "<": ">"}
                out.append(Ratio(value, bound if varied == "adamw" else flipped[bound]))
        return out

    def best_of(self, optimizer: str) -> Run | None:
        """The best single run of a peer or a recipe."""
        runs = [run for run in self.losses if run.optimizer == optimizer and run.steps == self.steps]
        return min(runs, key=self.losses.__getitem__, default=None)

    def slowdown(self) -> float | None:
        """Muon's seconds per step over AdamW's."""
        if not {"step muon", "step adamw"} <= set(self.times):
            return None
        return self.times["step muon"] / self.times["step adamw"]


def steps_to(points: Sequence[tuple[int, float]], goal: float) -> tuple[float, str]:
    """Steps after which the loss is `goal`: log(steps) against loss, a straight line between two schedules.

    With '<' or '>' where the goal lies outside the schedules: the steps are fewer or more than that.
    """
    if points[0][1] <= goal:
        return points[0][0], "<"
    for (n, above), (m, below) in itertools.pairwise(points):
        if below <= goal:
            part = (above - goal) / (above - below)
            return math.exp(math.log(n) + part * (math.log(m) - math.log(n))), ""
    return points[-1][0], ">"


def load(records: pathlib.Path) -> list[Evidence]:
    """One `Evidence` for each size that has a record, the smallest first; the toy of the tests is no evidence."""
    read = lambda path: [json.loads(row) for row in path.read_text().splitlines()] if path.exists() else []
    times: dict[str, dict[str, float]] = {size: {} for size in SIZES}
    for line in read(records / "loss_time.jsonl"):
        times[line["size"]][line["case"]] = line["median_s"]
    lines = {size: read(records / f"loss_{size}.jsonl") for size in SIZES if size != "toy"}
    return [Evidence(size, found, times[size]) for size, found in lines.items() if found]


def spread(values: Sequence[float], digits: int) -> str:
    """Mean, with lowest and highest."""
    if not values:
        return NOT_RUN
    mean, low, high = (f"{x:.{digits}f}" for x in (statistics.fmean(values), min(values), max(values)))
    return f"{mean} (1 seed)" if len(values) == 1 else f"{mean} ({low} to {high})"


def said(ratios: Sequence[Ratio], factor: float = 1.0) -> str:
    if not ratios:
        return NOT_RUN
    bounds = {ratio.bound for ratio in ratios if ratio.bound}
    if bounds:
        side = max if bounds == {"<"} else min
        word = {"<": "less than", ">": "more than"}[bounds.pop()]
        return f"{word} {factor * side(ratio.value for ratio in ratios):.2f}"
    return spread([factor * ratio.value for ratio in ratios], 2)


def settings(evidence: Evidence, name: str) -> str:
    """Best values, and how many runs were spent to find them."""
    if (run := evidence.tuned(name)) is None:
        return NOT_RUN
    third = f"b2 {run.b2:g}" if name == "adamw" else f"AdamW half x {run.adamw_multiple:g}"
    unfinished = "" if evidence.swept else ", unfinished"
    runs = f"{len(evidence.sweep_of(name))} runs{unfinished}"
    return f"rate {run.learning_rate:.2g}, decay {run.weight_decay:g}, {third} ({runs})"


def single(evidence: Evidence, optimizer: str) -> str:
    run = evidence.best_of(optimizer)
    return NOT_RUN if run is None else f"{evidence.losses[run]:.3f} at {run.learning_rate:.2g}"


def state(evidence: Evidence, name: str) -> str:
    run = evidence.tuned(name)
    return NOT_RUN if run is None else f"{evidence.lines[run]['state_bytes'] / 1e6:.1f} MB"


def share(evidence: Evidence, name: str) -> str:
    update, step = (evidence.times.get(f"{part} {name}") for part in ("update", "step"))
    return "not measured" if update is None or step is None else f"{update / step:.1%}"


def in_seconds(evidence: Evidence) -> str:
    slowdown = evidence.slowdown()
    return "not measured" if slowdown is None else said(evidence.ratios("muon"), 1 / slowdown)


def losses(evidence: Evidence, run: Run | None) -> str:
    return spread(list(evidence.seeds_of(run).values()), 3)


ROWS = {
    "held-out loss of AdamW, tuned": lambda e: losses(e, e.tuned("adamw")),
    "held-out loss of Muon, tuned": lambda e: losses(e, e.tuned("muon")),
    "held-out loss of Muon at AdamW's tuned rate and decay, nothing else changed": (
        lambda e: losses(e, e.default_run())
    ),
    "held-out loss of Muon, tuned, with its momentum in int8": lambda e: losses(e, e.in_int8()),
    "AdamW's steps over Muon's, to AdamW's final loss": lambda e: said(e.ratios("muon")),
    "the same in seconds": in_seconds,
    "AdamW's steps over Muon's, to Muon's final loss": lambda e: said(e.ratios("adamw")),
    "`optax.contrib.muon`, its own labels (seed 0, best of three rates)": lambda e: single(e, PEERS[0]),
    "`optax.contrib.muon`, our labels (seed 0, best of three rates)": lambda e: single(e, PEERS[1]),
    "AdamW's best values": lambda e: settings(e, "adamw"),
    "Muon's best values": lambda e: settings(e, "muon"),
    "optimizer state, AdamW and Muon": lambda e: f"{state(e, 'adamw')}, {state(e, 'muon')}",
    "update's share of a train step, AdamW and Muon": lambda e: f"{share(e, 'adamw')}, {share(e, 'muon')}",
}


def heading(evidence: Evidence) -> str:
    hidden = next(iter(evidence.lines.values()))["hidden_parameters"]
    return f"{hidden / 1e6:.1f}M hidden parameters, {evidence.steps} steps"


def target(evidence: Evidence) -> str:
    """The target for this size, met or missed, and by how much."""
    ratios = evidence.ratios("muon")
    if not ratios:
        return ""
    value, bound = statistics.fmean(r.value for r in ratios), said(ratios)
    met = "met" if value >= TARGET else f"missed by {1 - value / TARGET:.0%}"
    return f"{evidence.size}: {met} ({bound})"


def promise(evidence: Evidence) -> str:
    """How often Muon with AdamW's rate and decay beat AdamW, seed by seed."""
    adamw, muon = evidence.seeds_of(evidence.tuned("adamw")), evidence.seeds_of(evidence.default_run())
    both = sorted(set(adamw) & set(muon))
    if not both:
        return ""
    gains = [adamw[seed] - muon[seed] for seed in both]
    won = sum(gain > 0 for gain in gains)
    return f"{evidence.size}: lower in {won} of {len(both)} seeds, by {spread(gains, 3)}"


def missing(evidence: Evidence) -> str:
    """What a reader of the table should know was not run."""
    gaps = [] if evidence.swept else ["the sweep is unfinished"]
    counts = {
        "AdamW": evidence.seeds_of(evidence.tuned("adamw")),
        "Muon": evidence.seeds_of(evidence.tuned("muon")),
        "Muon at AdamW's rate": evidence.seeds_of(evidence.default_run()),
        "int8 momentum": evidence.seeds_of(evidence.in_int8()),
    }
    gaps += [
        f"{name} with {len(n)} of {len(SEEDS)} seeds" for name, n in counts.items() if len(n) < len(SEEDS)
    ]
    for name, what in (("muon", "shorter schedules of Muon"), ("adamw", "longer schedules of AdamW")):
        count = len(evidence.ratios(name))
        gaps += [f"{what} with {count} of {len(SEEDS)} seeds"] if count < len(SEEDS) else []
    gaps += [f"no {name}" for name in PEERS if evidence.best_of(name) is None]
    return f"{evidence.size}: {', '.join(gaps)}" if gaps else ""


def recipes(evidence: Evidence) -> str:
    found = [f"{name} {single(evidence, name)}" for name in RECIPES if evidence.best_of(name)]
    return f"{evidence.size}: {', '.join(found)}" if found else ""


def origin(sizes: Sequence[Evidence]) -> str:
    """Compute, machine, versions and corpus of all lines."""
    lines = [line for evidence in sizes for line in evidence.lines.values()]
    unique = lambda key: " and ".join(sorted({key(line) for line in lines}))
    hours = sum(line["seconds"] for line in lines) / 3600
    packages = ("jax", "optax", "flax", "numpy")
    return (
        f"{len(lines)} runs, {hours:.1f} hours of one core each (shared with other work, so not a measure of "
        f"speed), on {unique(lambda line: line['processor'])}; "
        f"{unique(lambda line: ', '.join(f'{name} {line[name]}' for name in packages))}; "
        f"corpus: {unique(lambda line: line['corpus']['name'])}, "
        f"sha256 {unique(lambda line: line['corpus']['sha256'][:16])}; "
        f"{unique(lambda line: str(line['tokens_per_step']))} bytes a step."
    )


def report(sizes: Sequence[Evidence]) -> str:
    """The markdown between the README's markers."""
    if not sizes:
        return "No record yet: run tests/benchmarks/bench_loss.py."
    lines = ["| | " + " | ".join(map(heading, sizes)) + " |", "|---|" + "---|" * len(sizes)]
    lines += [f"| {name} | " + " | ".join(map(cell, sizes)) + " |" for name, cell in ROWS.items()]
    notes = {
        f"Target, Muon in at most 1/{TARGET} of AdamW's steps": target,
        "Muon at AdamW's rate and decay against AdamW": promise,
        "Recipes (seed 0, best of three rates each)": recipes,
        "Not run": missing,
    }
    for name, note in notes.items():
        said_of = [text for text in map(note, sizes) if text]
        if note is missing:
            absent = [size for size in SIZES if size not in {"toy", *(e.size for e in sizes)}]
            said_of += [f"{size}, of width {SIZES[size].width}, at all" for size in absent]
        lines += ["", f"{name}: {'; '.join(said_of)}."] if said_of else []
    return "\n".join([*lines, "", origin(sizes)])


def into(path: pathlib.Path, text: str) -> None:
    """Puts the report between the markers of a file."""
    before, rest = path.read_text().split(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=pathlib.Path, default=RECORDS)
    parser.add_argument("--picture", type=pathlib.Path, help="also draw, to this file")
    parser.add_argument("--readme", type=pathlib.Path, help="also put the table between this file's markers")
    arguments = parser.parse_args()
    sizes = load(arguments.records)
    text = report(sizes)
    print(text)
    if arguments.readme:
        into(arguments.readme, text)
    if arguments.picture and sizes:
        import loss_picture

        loss_picture.draw(sizes).savefig(arguments.picture, dpi=130)


if __name__ == "__main__":
    main()
