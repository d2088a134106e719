"""The static plan: which matrices share a stack, which device owns each, and how much work that gives a device.

Nothing here sees an array. A plan is a hashable value made of shapes, views and mesh axes, so that it can be
computed before training, compared, and used as a static argument of `jax.jit`.

The unit of travel is one batch entry of a leaf with all its matrix axes. Units of equal size and placement form a
group. A group is a table of `slots` rows and one column per owner: unit e lies in row e // owners, column
e % owners, except that the units of an incomplete last row may start at a later owner, which is how groups of
different cost are balanced against each other.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from optax_muon.parameters import MatrixView

Axes = tuple[str, ...]

# Local bytes of one concatenated stack; a larger group is divided, which bounds what is alive at a time. A stack that
# is worked on where it lies is overwritten in place; one that travels in rounds needs a second one for the results.
STACK_BYTES = 1 << 30
TRAVELLING_STACK_BYTES = 512 << 20
# Local bytes of one exchange; a larger stack travels in rounds.
ROUND_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """What the plan has to know of one leaf.

    Attributes:
        path: for messages.
        shape: global shape (over the free mesh axes).
        view: the resolved MatrixView.
        spec: for every axis of the leaf the mesh axes that cut it, major to minor; () where it is whole.
        wire_dtype: name of the dtype in which the leaf's matrices travel and are worked on.
        varying: manual axes over which the leaf varies (kept apart so that the types stay right).
    """

    path: str
    shape: tuple[int, ...]
    view: MatrixView
    spec: tuple[Axes, ...]
    wire_dtype: str
    varying: Axes = ()


@dataclasses.dataclass(frozen=True)
class Kind:
    """How one unit of travel is laid out when it is whole: its shape, which mesh axes cut it, its view."""

    shape: tuple[int, ...]
    cut: tuple[Axes, ...]
    view: MatrixView | None  # None: the unit is one matrix [fan_in, fan_out]

    def local_shape(self, sizes: dict[str, int]) -> tuple[int, ...]:
        """The shape of one device's piece."""
        return tuple(n // _size(axes, sizes) for n, axes in zip(self.shape, self.cut, strict=True))


@dataclasses.dataclass(frozen=True)
class Part:
    """`count` units of leaf number `leaf` (its `piece`-th stack of matrices), all of one kind."""

    leaf: int
    piece: int
    count: int
    kind: int


@dataclasses.dataclass(frozen=True)
class Group:
    """Units that travel in one exchange and are worked on by one loop body.

    Attributes:
        matrices: (number, short side, long side) of the matrices in one unit.
        kinds: the layouts that occur.
        parts: the units, in order.
        owner_axes: mesh axes that cut the matrices: these exchange pieces.
        spread_axes: further mesh axes that share the work; the results are gathered over them.
        batch_axes: mesh axes that cut the stack: each of their shards is a problem of its own.
        piece: shape in which one device's piece of one unit travels: as it lies, or flat where kinds differ.
        wire_dtype: dtype name.
        owners: number of devices that share the units.
        slots: rows of the table, a multiple of chunk * rounds.
        start: the owner at which the units of the last, incomplete row start.
        chunk: slots worked on at a time.
        rounds: number of exchanges in each direction. Where there are several, the last one starts early enough
            to be full, and what it does twice comes out the same twice.
    """

    matrices: tuple[tuple[int, int, int], ...]
    kinds: tuple[Kind, ...]
    parts: tuple[Part, ...]
    owner_axes: Axes
    spread_axes: Axes
    batch_axes: Axes
    piece: tuple[int, ...]
    wire_dtype: str
    owners: int
    slots: int
    start: int
    chunk: int
    rounds: int

    @property
    def count(self) -> int:
        return sum(part.count for part in self.parts)

    @property
    def full(self) -> int:
        """Number of units before the last, incomplete row of a single round."""
        return self.count // self.owners * self.owners

    def kinds_in_order(self) -> np.ndarray:
        """int32[count]: the kind of every unit."""
        return np.repeat([part.kind for part in self.parts], [part.count for part in self.parts]).astype(
            np.int32
        )

    def table(self) -> np.ndarray:
        """int32[slots, owners] of a single round: the kind of the unit in each slot, -1 where the slot is empty."""
        kinds = self.kinds_in_order()
        table = np.full(self.slots * self.owners, -1, np.int32)
        table[: self.full] = kinds[: self.full]
        last = self.full + self.start
        table[last : last + self.count - self.full] = kinds[self.full :]
        return table.reshape(self.slots, self.owners)

    def moved_bytes(self, sizes: dict[str, int]) -> int:
        """Bytes that one device puts on the wire and takes from it, both ways (output bytes of the collectives)."""
        row = _unit_bytes(self)
        pieces, spread = _size(self.owner_axes, sizes), _size(self.spread_axes, sizes)
        exchange = 2 * self.slots * pieces * row if pieces > 1 else 0
        return exchange + (self.slots * pieces * spread * row if spread > 1 else 0)


@dataclasses.dataclass(frozen=True)
class Plan:
    """All groups of a tree on a mesh.

    Attributes:
        leaves: the leaves, in the order of the arrays.
        axes: (name, size) of the mesh axes, in mesh order; () without a mesh.
        groups: in the order in which they run.
        loads: matrix work of each device in mesh order, in the units of the cost function.
    """

    leaves: tuple[LeafSpec, ...]
    axes: tuple[tuple[str, int], ...]
    groups: tuple[Group, ...]
    loads: tuple[float, ...]

    @property
    def imbalance(self) -> float:
        """Work of the busiest device over the mean."""
        mean = math.fsum(self.loads) / len(self.loads)
        return max(self.loads) / mean if mean else 1.0

    @property
    def moved_bytes(self) -> int:
        """Output bytes of all collectives on one device in one update."""
        return sum(group.moved_bytes(dict(self.axes)) for group in self.groups)


@functools.lru_cache(maxsize=64)
def make_plan(
    leaves: tuple[LeafSpec, ...],
    axes: tuple[tuple[str, int], ...],
    spread: Axes,
    cost: Callable[[int, int], float],
    chunk: Callable[[int, int], int],
) -> Plan:
    """Groups the leaves' matrices and gives every unit an owner.

    Args:
        leaves: one LeafSpec per leaf, none of size zero.
        axes: (name, size) of the mesh axes in mesh order.
        spread: the mesh axes that may share work beside those that cut the matrices anyway.
        cost: work of one matrix with the given short and long side, in any unit.
        chunk: how many such matrices to work on at a time.

    Returns:
        A Plan. Groups are balanced greedily, the costliest unit first (longest processing time): the incomplete last
        row of a group goes to the window of owners whose busiest device is least busy so far.
    """
    sizes = dict(axes)
    groups = [
        _shape_group(group, chunk)
        for whole in _gather_units(leaves, sizes, spread).values()
        for group in _divide(whole)
    ]
    loads = np.zeros([size for _, size in axes] or [1])
    by_cost = sorted(range(len(groups)), key=lambda i: -_unit_cost(groups[i], cost))
    for i in by_cost:
        groups[i] = _place_last_row(groups[i], loads, axes, _unit_cost(groups[i], cost))
    return Plan(leaves, axes, tuple(groups), tuple(loads.ravel().tolist()))


def units_of(leaf: LeafSpec, sizes: dict[str, int]) -> list[tuple[Kind, int]]:
    """(kind, number of units on one device) for every stack into which a leaf is taken apart.

    A leaf whose matrices are whole on every device is taken apart into matrices at once, so that blocks join the
    matrices of their shape; otherwise its batch entries travel whole and are taken apart by their owner.
    """
    batch = leaf.view.batch_axes(len(leaf.shape))
    local = tuple(
        n // _size(leaf.spec[axis], sizes) if axis in batch else n for axis, n in enumerate(leaf.shape)
    )
    rest = [axis for axis in range(len(leaf.shape)) if axis not in batch]
    if any(leaf.spec[axis] for axis in rest):
        kind = Kind(
            tuple(leaf.shape[axis] for axis in rest),
            tuple(leaf.spec[axis] for axis in rest),
            leaf.view.unbatched(len(leaf.shape)),
        )
        return [(kind, math.prod(local[axis] for axis in batch))]
    shapes = leaf.view.matrix_shapes(local)
    return [(Kind((s.fan_in, s.fan_out), ((), ()), None), s.count) for s in shapes]


def _gather_units(leaves: Sequence[LeafSpec], sizes: dict[str, int], spread: Axes) -> dict[tuple, Group]:
    """One preliminary group (slots, start, chunk, rounds unset) per key, in order of first appearance."""
    found: dict[tuple, Group] = {}
    for i, leaf in enumerate(leaves):
        batch = leaf.view.batch_axes(len(leaf.shape))
        cut = {name: axis in batch for axis, names in enumerate(leaf.spec) for name in names}
        owner_axes = tuple(name for name in sizes if cut.get(name) is False)
        batch_axes = tuple(name for name in sizes if cut.get(name) is True)
        spread_axes = tuple(name for name in sizes if name in spread and name not in cut)
        for piece, (kind, count) in enumerate(units_of(leaf, sizes)):
            matrices = _matrices(kind)
            local = kind.local_shape(sizes)
            alike = kind if kind.view is not None and kind.view.blocks else None
            key = (
                matrices,
                alike,
                owner_axes,
                batch_axes,
                spread_axes,
                math.prod(local),
                leaf.wire_dtype,
                leaf.varying,
            )
            group = found.setdefault(
                key,
                Group(matrices, (), (), owner_axes, spread_axes, batch_axes, local, leaf.wire_dtype,
                      _size(owner_axes + spread_axes, sizes), 0, 0, 1, 1),
            )  # fmt: skip
            kinds = group.kinds if kind in group.kinds else (*group.kinds, kind)
            parts = (*group.parts, Part(i, piece, count, kinds.index(kind)))
            travels = local if local == group.piece else (math.prod(local),)
            found[key] = dataclasses.replace(group, kinds=kinds, parts=parts, piece=travels)
    return found


def _matrices(kind: Kind) -> tuple[tuple[int, int, int], ...]:
    if kind.view is None:
        return ((1, *sorted(kind.shape)),)  # pyright: ignore[reportReturnType]
    shapes = kind.view.matrix_shapes(kind.shape)
    return tuple((s.count, min(s.fan_in, s.fan_out), max(s.fan_in, s.fan_out)) for s in shapes)


def _divide(group: Group) -> list[Group]:
    """Divides the parts so that no concatenated stack exceeds its limit; a single part is never divided."""
    unit = _unit_bytes(group)
    limit = STACK_BYTES if group.owners == 1 else TRAVELLING_STACK_BYTES
    out: list[list[Part]] = [[]]
    total = 0
    for part in group.parts:
        if out[-1] and total + part.count * unit > limit:
            out.append([])
            total = 0
        out[-1].append(part)
        total += part.count * unit
    return [dataclasses.replace(group, parts=tuple(parts)) for parts in out]


def _shape_group(group: Group, chunk: Callable[[int, int], int]) -> Group:
    """Fixes slots, chunk and rounds."""
    rows = -(-group.count // group.owners)
    alone = min(max(1, chunk(m, n) // number) for number, m, n in group.matrices)
    at_a_time = _even(rows, alone)
    chunks = -(-rows // at_a_time)
    row_bytes = _unit_bytes(group) * group.owners
    per_round = max(1, ROUND_BYTES // (row_bytes * at_a_time)) if group.owners > 1 else chunks
    per_round = _even(chunks, per_round)
    rounds = -(-chunks // per_round)
    return dataclasses.replace(group, slots=rounds * per_round * at_a_time, chunk=at_a_time, rounds=rounds)


def _even(rows: int, limit: int) -> int:
    """At most `limit` rows at a time, such that the last turn is nearly full."""
    if rows <= limit:
        return rows
    return min(range(limit, limit // 2, -1), key=lambda n: (-(-rows // n) * n, -n))


def _place_last_row(group: Group, loads: np.ndarray, axes: Sequence[tuple[str, int]], unit: float) -> Group:
    """Chooses `start` by the loads so far, and adds the group's work to `loads`."""
    mine = group.spread_axes + group.owner_axes
    names = [name for name, _ in axes]
    order = [names.index(name) for name in mine]
    view = np.moveaxis(loads, order, range(len(order)))
    dims = view.shape[: len(order)]
    busy = view.reshape(*dims, -1).max(-1).reshape(group.owners)
    left = group.count - group.full if group.rounds == 1 else 0
    start = 0
    if left:
        windows = np.lib.stride_tricks.sliding_window_view(busy, left)
        start = int(np.lexsort((windows.sum(-1), windows.max(-1)))[0])
    rows = group.full // group.owners if group.rounds == 1 else group.slots
    work = np.full(group.owners, rows * unit)
    work[start : start + left] += unit
    view += work.reshape(*dims, *[1] * (loads.ndim - len(order)))
    return dataclasses.replace(group, start=start)


def _unit_cost(group: Group, cost: Callable[[int, int], float]) -> float:
    return math.fsum(number * cost(m, n) for number, m, n in group.matrices)


def _size(axes: Sequence[str], sizes: dict[str, int]) -> int:
    return math.prod(sizes[name] for name in axes)


def _unit_bytes(group: Group) -> int:
    return math.prod(group.piece) * jnp.dtype(group.wire_dtype).itemsize
