"""One JSON line per measurement: what was measured, where, with which versions, and by which command."""

import datetime
import json
import pathlib
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

RECORDS = pathlib.Path(__file__).parent / "records"


def machine() -> dict[str, Any]:
    """Device, processor and versions."""
    import os

    import jax

    with open("/proc/cpuinfo") as file:
        names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    return {
        "device": f"{jax.devices()[0].device_kind} x {jax.device_count()}",
        "processor": f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        **{name: version(name) for name in ("jax", "jaxlib", "optax", "numpy")},
    }


def write(name: str, rows: list[Mapping[str, Any]]) -> pathlib.Path:
    """Appends rows to records/<name>.jsonl, each with date, command and machine."""
    RECORDS.mkdir(exist_ok=True)
    path = RECORDS / f"{name}.jsonl"
    command = shlex.join(["python", f"tests/benchmarks/{pathlib.Path(sys.argv[0]).name}", *sys.argv[1:]])
    common = {"date": datetime.date.today().isoformat(), "command": command, **machine()}
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps({**row, **common}) + "\n")
            print(json.dumps(row))
    return path


def interleaved(candidates: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds of each candidate, in turn, so that drift of the machine reaches all alike.

    A candidate returns only when its work is done. The first call of each, which compiles, is not counted.
    """
    for run in candidates.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {
        name: {"median_s": statistics.median(s), "min_s": min(s), "max_s": max(s), "n": len(s)}
        for name, s in seconds.items()
    }
