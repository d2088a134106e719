"""Compiles for TPU pods on a machine that has none, and reads collectives and temporaries off the program.

libtpu contains the real TPU compiler, which needs no TPU. Numbers here are the compiler's own: bytes are output bytes
of collectives on one device, times the trip counts of the loops around them.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import math
import os
import re
import tempfile
from collections import defaultdict

import jax
import numpy as np

HAVE_LIBTPU = importlib.util.find_spec("libtpu") is not None

# Without these libtpu asks the cloud's metadata server where it is.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
KINDS = ("all-to-all", "all-gather", "all-reduce", "reduce-scatter", "collective-permute")
MIB = 2**20


def mesh(topology, shape, names, kind):
    """A mesh over a topology such as 'v5p:4x4x4', which no machine here has."""
    devices = np.array(_devices(topology)).reshape(shape)
    return jax.sharding.Mesh(devices, names, axis_types=(kind,) * len(names))


@functools.cache
def _devices(topology):
    from jax.experimental import topologies

    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices


@dataclasses.dataclass(frozen=True)
class Collective:
    kind: str
    bytes: int
    trips: int  # product of the trip counts of the loops around it; 1 outside loops
    depth: int  # number of loops around it


@dataclasses.dataclass(frozen=True)
class Program:
    collectives: tuple[Collective, ...]
    temporaries: int
    arguments: int
    flops: float
    warnings: str
    optimal_seconds: float

    @property
    def moved(self):
        return sum(c.bytes * c.trips for c in self.collectives)

    def count(self, kind=None):
        return sum(c.trips for c in self.collectives if kind in (None, c.kind))

    def by_kind(self):
        out = defaultdict(lambda: [0, 0.0])
        for c in self.collectives:
            out[c.kind][0] += c.trips
            out[c.kind][1] += c.bytes * c.trips / MIB
        return {kind: (count, round(mib, 1)) for kind, (count, mib) in out.items()}


def read(compiled, warnings=""):
    """Reads a compiled program."""
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    return Program(
        tuple(collectives(compiled.as_text())),
        memory.temp_size_in_bytes,
        memory.argument_size_in_bytes,
        cost.get("flops", 0.0),
        warnings,
        cost.get("optimal_seconds", 0.0),
    )


def compile_and_read(lowered):
    """Compiles, keeping what the compiler says on stderr ("Involuntary full rematerialization" and the like)."""
    with quiet() as said:
        compiled = lowered.compile()
    return read(compiled, said())


@contextlib.contextmanager
def quiet():
    """What C++ writes to file descriptor 2 meanwhile."""
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        text = []

        def said():
            return text[0] if text else ""

        try:
            yield said
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            text.append(file.read().decode(errors="replace"))


def collectives(text):
    """All collectives of an HLO module's text with their output bytes and trips."""
    found, callers, current = defaultdict(list), defaultdict(list), None
    for line in text.splitlines():
        header = re.match(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line)
        if header:
            current = header.group(1)
            continue
        match = re.match(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([\w\-]+)\((.*)$", line)
        if not match or current is None:
            continue
        shape, op, rest = match.groups()
        kind = op.removesuffix("-start")
        if kind in KINDS:
            found[current].append((kind, _bytes(shape, op)))
        elif op == "async-start" and (called := re.search(r"calls=%?([\w.\-]+)", rest)):
            callers[called.group(1)].append((current, 1, 0))
            continue
        if op == "while":
            names = dict(re.findall(r"(body|condition)=%?([\w.\-]+)", rest))
            for name in names.values():
                callers[name].append((current, _trips(rest, text, names["condition"]), 1))
        else:
            for names in re.findall(
                r"(?:calls|to_apply|branch_computations|true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)",
                rest,
            ):
                for name in re.findall(r"[\w.\-]+", names):
                    callers[name].append((current, 1, 0))

    @functools.cache
    def around(name):
        places = [
            (trips * t, depth + d)
            for parent, t, d in set(callers.get(name, ()))
            for trips, depth in around(parent)
        ]
        return tuple(places) or ((1, 0),)

    for name, items in found.items():
        for trips, depth in around(name):
            for kind, size in items:
                yield Collective(kind, size, trips, depth)


def _trips(rest, text, condition):
    """The trip count that the compiler notes, else the constant that the counter is compared with."""
    noted = re.search(r'known_trip_count":\{"n":"(\d+)"', rest)
    if noted:
        return int(noted.group(1))
    body = re.search(rf"^%?{re.escape(condition)} \(.*?^\}}", text, re.M | re.S)
    limits = re.findall(r"s32\[\]\S* constant\((\d+)\)", body.group(0)) if body else []
    if len(limits) != 1 or "direction=LT" not in body.group(0):
        raise ValueError(f"the trip count of the loop with condition {condition} cannot be read")
    return int(limits[0])


_SIZES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "bf16": 2,
    "f16": 2,
    "s16": 2,
    "u16": 2,
    "f32": 4,
    "s32": 4,
    "u32": 4,
    "f64": 8,
    "s64": 8,
}


def _bytes(shape, op):
    sizes = [
        _SIZES[dtype] * math.prod(int(n) for n in dims.split(",") if n)
        for dtype, dims in re.findall(r"\b(pred|[bsuf]\w*\d+)\[([\d,]*)\]", shape)
    ]
    if not sizes:
        return 0
    # An asynchronous start returns its operand beside the result (and, for permutes, two flags).
    if op.endswith("-start"):
        return max(sizes)
    return sum(sizes)
