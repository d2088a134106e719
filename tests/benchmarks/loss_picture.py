"""The picture of `report_loss.py`: for each size the curves, the complete schedules, and the rates that were tried."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import TYPE_CHECKING

from loss_plan import Run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from report_loss import Evidence

NAMES = {"adamw": "AdamW", "muon": "Muon"}
COLORS = {"adamw": "#c2571a", "muon": "#2a62b0", "default": "#7fa9dc"}


def draw(sizes: Sequence[Evidence]) -> Figure:
    """One row per size."""
    import matplotlib.pyplot as plt

    figure, rows = plt.subplots(
        len(sizes), 3, figsize=(12, 3.4 * len(sizes)), layout="constrained", squeeze=False
    )
    for row, evidence in zip(rows, sizes, strict=True):
        for axis, panel in zip(row, (curves, schedules, rates), strict=True):
            panel(axis, evidence)
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(alpha=0.25)
        row[0].set_ylabel(f"{evidence.size}: held-out loss, nats per byte")
    return figure


def curves(axis: Axes, evidence: Evidence) -> None:
    """Mean over the seeds that ran, and their range."""
    default = evidence.default_run()
    shown: dict[str, tuple[str, Run | None]] = {
        "adamw": ("AdamW, tuned", evidence.tuned("adamw")),
        "muon": ("Muon, tuned", evidence.tuned("muon")),
        "default": ("Muon at AdamW's rate", default if default != evidence.tuned("muon") else None),
    }
    tails = []
    for name, (label, run) in shown.items():
        seeds = evidence.seeds_of(run)
        if run is None or not seeds:
            continue
        lines = [evidence.lines[dataclasses.replace(run, seed=seed)]["curve"] for seed in seeds]
        steps = [step for step, _ in lines[0]]
        columns = [[line[i][1] or math.nan for line in lines] for i in range(len(steps))]
        means = [statistics.fmean(column) for column in columns]
        axis.plot(
            steps, means, color=COLORS[name], marker="o", markersize=3, label=f"{label}: {means[-1]:.3f}"
        )
        axis.fill_between(
            steps,
            list(map(min, columns)),
            list(map(max, columns)),
            color=COLORS[name],
            alpha=0.2,
            linewidth=0,
        )
        tails += means[1:]
    if finite := [x for x in tails if math.isfinite(x)]:
        axis.set_ylim(min(finite) - 0.05, max(finite) + 0.05)
        axis.legend(frameon=False)
    axis.set_xlabel("training step")


def schedules(axis: Axes, evidence: Evidence) -> None:
    """Each point is a whole run with a schedule of its own."""
    for name in ("adamw", "muon"):
        found: dict[int, list[float]] = {}
        for seed in (0, 1, 2):
            for steps, loss in evidence.schedules(name, seed):
                found.setdefault(steps, []).append(loss)
        for steps, values in found.items():
            axis.plot([steps] * len(values), values, ".", color=COLORS[name], alpha=0.6)
        steps = sorted(found)
        means = [statistics.fmean(found[n]) for n in steps]
        axis.plot(steps, means, color=COLORS[name], label=NAMES[name])
    goal = evidence.seeds_of(evidence.tuned("adamw"))
    if goal:
        axis.axhline(statistics.fmean(goal.values()), color=COLORS["adamw"], linestyle=":", linewidth=1)
    ticks = sorted({run.steps for run in evidence.lines})
    axis.set_xscale("log")
    axis.set_xticks(ticks, [str(n) for n in ticks], fontsize=8)
    axis.minorticks_off()
    axis.set_xlabel("steps of the whole schedule")


def rates(axis: Axes, evidence: Evidence) -> None:
    """The sweep along the learning rate, everything else at its first value."""
    from report_loss import said

    for name in ("adamw", "muon"):
        runs = [run for run in evidence.sweep_of(name) if run == first_values(run)]
        points = sorted((run.learning_rate, evidence.losses[run]) for run in runs)
        if points:
            axis.plot(
                *zip(*points, strict=True), color=COLORS[name], marker="o", markersize=4, label=NAMES[name]
            )
    axis.set_xscale("log")
    swept = [run for name in NAMES for run in evidence.sweep_of(name) if run == first_values(run)]
    ticks = sorted({run.learning_rate for run in swept})
    axis.set_xticks(ticks, [f"{rate * 1e3:g}e-3" for rate in ticks], fontsize=8)
    axis.minorticks_off()
    axis.set_xlabel("learning rate (decay 0.1, seed 0)")
    if evidence.ratios("muon"):
        axis.set_title(f"steps to equal loss, AdamW / Muon: {said(evidence.ratios('muon'))}", fontsize=9)


def first_values(run: Run) -> Run:
    return Run(run.size, run.optimizer, run.steps, learning_rate=run.learning_rate)
