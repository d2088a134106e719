"""How many bytes of temporaries a traced program needs on one device: a model of what the compiler will do.

Elementwise operations, slices, transpositions and broadcasts are fused into what consumes them and need no
memory of their own. Matrix products, concatenations, collectives, loops and reductions write their result. A
result takes the place of an operand that nothing else needs, where the operation allows it, and temporaries
take the place of results that are not written yet. Operations are ordered by their depth in the program, which
is how XLA orders independent chains on CPU; a compiler that works chain by chain needs less.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

# The same memory under another shape or type.
_VIEWS = {"reshape", "squeeze", "expand_dims", "copy", "sharding_constraint", "reshard", "pvary", "pcast"}
# Fused into what consumes them, but entry by entry they read elsewhere than they write.
_MOVES = {"transpose", "slice", "dynamic_slice", "rev", "pad", "gather", "split"}
# Write their result, and read arrays that must be in memory.
_ON_ARRAYS = {
    "dot_general", "all_to_all", "all_gather", "psum", "psum_invariant", "ppermute", "reduce_scatter", "sort", "svd",
    "qr", "eigh", "cholesky", "triangular_solve", "conv_general_dilated", "top_k",
}  # fmt: skip
# Write their result, and read expressions.
_WRITES = {
    "concatenate", "dynamic_update_slice", "scatter", "scatter-add", "argmax", "argmin", "cumsum", "reduce_sum",
    "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or",
}  # fmt: skip
# XLA fuses a concatenation of so few parts into what consumes it.
_FUSED_PARTS = 8
_IN_PLACE = {"dynamic_update_slice", "scatter", "scatter-add"}


def temporary_bytes(program: Any, donated: int = 0) -> int:
    """Peak bytes of the temporaries of a program on one device.

    Args:
        program: a ClosedJaxpr from `jax.make_jaxpr`. In `shard_map` shapes are a device's own; outside, the Explicit
            shardings of the types say what a device holds. Arguments and results are no temporaries.
        donated: how many of the leading arguments are donated: results take their place.

    Returns:
        Bytes.
    """
    return sum(_Model(program.jaxpr, donated, in_place=False).peak())


@dataclasses.dataclass(eq=False)
class _Storage:
    """A stretch of memory, from the depth at which it is written to the one at which it is read last."""

    size: int
    first: int
    last: int
    counted: bool = True
    writable: bool = True


@dataclasses.dataclass(eq=False)
class _Value:
    """An array of the program: in memory, or an expression of arrays in memory."""

    size: int
    storage: _Storage | None = None
    sources: tuple["_Value", ...] = ()
    pointwise: bool = True

    def leaves(self) -> tuple["_Value", ...]:
        """What an expression of this value reads.

        What is one other array but for cheap operations is computed again where it is needed, even if a matrix
        product had it brought into memory.
        """
        wide = [x for x in self.sources if x.size >= self.size]
        return self.sources if self.storage is None or len(wide) == 1 else (self,)

    @property
    def depth(self) -> int:
        if self.storage is not None:
            return self.storage.first
        return max((s.depth for s in self.sources), default=0)


@dataclasses.dataclass(eq=False)
class _Room:
    """Memory of a result that is free from one depth to another."""

    size: int
    first: int
    last: int
    guests: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def takes(self, size: int, first: int, last: int) -> bool:
        """Whether an array finds room, which it then has."""
        fits = size <= self.size and self.first <= first and last <= self.last
        if not fits or any(first <= end and start <= last for start, end in self.guests):
            return False
        self.guests.append((first, last))
        return True


class _Model:
    """Walks a program once and keeps its storages, what each may take the place of, and the peaks inside loops.

    `donated` arguments lend their memory to results; if `in_place`, to anything (the carry of a loop).
    """

    def __init__(self, jaxpr: Any, donated: int, in_place: bool) -> None:
        self.storages: list[_Storage] = []
        self.takeovers: list[tuple[int, _Storage, list[_Storage]]] = []
        self.inside: dict[int, list[int]] = {}
        variables, first = (*jaxpr.constvars, *jaxpr.invars), len(jaxpr.constvars)
        self.inputs = [
            _Value(
                _size(v.aval), _Storage(_size(v.aval), 0, 0, counted=False, writable=in_place and i >= first)
            )
            for i, v in enumerate(variables)
        ]
        self.donated = self.inputs[first : first + donated]
        self.results: list[tuple[int, int]] = []  # (size, depth at which it is written)
        for value in self.walk(jaxpr, self.inputs):
            self.read([value], value.depth + 1)
            if value.storage is not None:
                value.storage.counted = False
            self.results.append((value.size, value.depth if value.storage else value.depth + 1))
        self.share()

    def rooms(self) -> list[_Room]:
        """The memory of the results, as far as it is free before they are written."""
        arguments = [(x.size, x.storage.last) for x in self.donated if x.storage is not None]
        rooms = []
        for size, written in self.results:
            mine = next((a for a in arguments if a[0] == size), None)
            if mine is not None:
                arguments.remove(mine)
            rooms.append(_Room(size, 0 if mine is None else mine[1] + 1, written - 1))
        return sorted(rooms, key=lambda room: room.size)

    def peak(self) -> list[int]:
        """Sizes of what is in memory when most is, beside what finds room in the memory of the results."""
        rooms = self.rooms()
        held = [(s.size, s.first, s.last) for s in self.storages if s.counted]
        held += [(size, depth, depth) for depth, sizes in self.inside.items() for size in sizes]
        left = [x for x in sorted(held, reverse=True) if not any(room.takes(*x) for room in rooms)]
        at = lambda depth: [size for size, first, last in left if first <= depth <= last]
        return max((at(depth) for depth in {first for _, first, _ in left}), key=sum, default=[])

    def walk(self, jaxpr: Any, inputs: Sequence[_Value]) -> list[_Value]:
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))
        value = lambda x: (
            _Value(0, _Storage(0, 0, 0, counted=False, writable=False)) if hasattr(x, "val") else known[x]
        )
        for equation in jaxpr.eqns:
            operands = [value(x) for x in equation.invars]
            known |= zip(equation.outvars, self.apply(equation, operands), strict=True)
        return [value(x) for x in jaxpr.outvars]

    def apply(self, equation: Any, operands: list[_Value]) -> list[_Value]:
        name, sizes = equation.primitive.name, [_size(v.aval) for v in equation.outvars]
        body = _called(equation)
        if body is not None:
            consts = [_Value(0, _Storage(0, 0, 0, counted=False, writable=False)) for _ in body.constvars]
            return self.walk(body, [*consts, *operands])
        if name in ("while", "scan", "cond"):
            return self.control(equation, operands, sizes)
        if name in _VIEWS or (name == "dynamic_slice" and operands[0].size == sizes[0]):
            return [operands[0]]
        if name == "dynamic_update_slice" and operands[1].size == sizes[0]:  # all of it
            return [operands[1]]
        few = name == "concatenate" and len(operands) <= _FUSED_PARTS
        if (name in _ON_ARRAYS or name in _WRITES) and not few:
            if name in _ON_ARRAYS:
                for operand in operands:
                    self.write(operand)
            out = self.result(operands, sizes, operands[:1] if name in _IN_PLACE else [])
            # The pieces that arrive are put together in another place.
            return self.result(out, sizes, []) if name == "all_to_all" else out
        sources = tuple(dict.fromkeys(leaf for x in operands for leaf in x.leaves()))
        pointwise = (
            not few and name not in _MOVES and all(x.pointwise or x.storage is not None for x in operands)
        )
        out = [_Value(size, None, sources, pointwise) for size in sizes]
        kept = [x for x in sources if x.storage is not None and x.storage.counted and x.size >= sizes[0]]
        if pointwise and len(kept) > 1:
            self.write(out[0])  # one array instead of two that would be kept for it
        return out

    def control(self, equation: Any, operands: list[_Value], sizes: list[int]) -> list[_Value]:
        """A loop or a branch: its carry stays in one place, and its body has a peak of its own."""
        loops = equation.primitive.name != "cond"
        bodies = [equation.params[key] for key in ("jaxpr", "body_jaxpr") if key in equation.params]
        bodies += equation.params.get("branches", ())
        for operand in operands:
            self.write(operand)
        out = self.result(operands, sizes, operands if loops else [])
        depth = max((v.depth for v in out), default=0)
        given = len(operands) if loops else 0
        peak = max((_Model(_open(body), given, in_place=loops).peak() for body in bodies), key=sum)
        self.inside[depth] = max(self.inside.get(depth, []), peak, key=sum)
        return out

    def result(self, operands: list[_Value], sizes: list[int], homes: list[_Value]) -> list[_Value]:
        """New storages, which may take the place of one of the homes."""
        depth = 1 + max((x.depth for x in operands), default=0)
        self.read(operands, depth)
        places = [home.storage for home in homes]
        return [_Value(size, self.new(size, depth, places)) for size in sizes]

    def write(self, value: _Value) -> None:
        """Brings an expression into memory."""
        if value.storage is None:
            depth = 1 + value.depth
            self.read([value], depth)
            homes = [s.storage for s in value.sources] if value.pointwise else []
            value.storage = self.new(value.size, depth, homes)

    def new(self, size: int, depth: int, homes: Sequence[_Storage | None]) -> _Storage:
        storage = _Storage(size, depth, depth)
        self.storages.append(storage)
        self.takeovers.append((depth, storage, [home for home in homes if home is not None]))
        return storage

    def read(self, values: Sequence[_Value], depth: int) -> None:
        for value in values:
            for leaf in (value,) if value.storage is not None else value.sources:
                if leaf.storage is not None:
                    leaf.storage.last = max(leaf.storage.last, depth)

    def share(self) -> None:
        """Lets every storage take the place of an operand of its size that is read for the last time."""
        stands_for: dict[int, _Storage] = {}
        for depth, storage, homes in sorted(self.takeovers, key=lambda t: t[0]):
            for home in homes:
                home = stands_for.get(id(home), home)
                if home.writable and home.last == depth and home.size == storage.size:
                    home.last = max(home.last, storage.last)
                    home.counted &= storage.counted  # what ends as a result is the memory of the result
                    storage.counted = False
                    stands_for[id(storage)] = home
                    break


def _called(equation: Any) -> Any:
    """The program of an equation that only calls it, or None."""
    if equation.primitive.name in ("while", "scan", "cond"):
        return None
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if name in equation.params:
            return _open(equation.params[name])
    return None


def _open(program: Any) -> Any:
    """The Jaxpr of a Jaxpr with or without its constants."""
    return program.jaxpr if hasattr(program, "consts") and hasattr(program, "jaxpr") else program


def _size(aval: Any) -> int:
    """Bytes of an array on one device."""
    if not hasattr(aval, "shape"):
        return 0
    sharding, parts = getattr(aval, "sharding", None), 1
    if sharding is not None and not sharding.mesh.empty:
        names = [n for e in sharding.spec if e is not None for n in ((e,) if isinstance(e, str) else e)]
        parts = math.prod(sharding.mesh.shape[n] for n in names)
    try:
        return math.prod(aval.shape) * jnp.dtype(aval.dtype).itemsize // parts
    except TypeError:  # keys and the like
        return 0
