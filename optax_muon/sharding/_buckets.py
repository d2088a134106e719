"""The static plan: which matrices travel and are worked on together, which device owns each, and how much that is.

Nothing here sees an array. A plan is a hashable value made of shapes, views and mesh axes, so that it can be
computed before training, compared, and used as a static argument of `jax.jit`.

The unit of travel is one batch entry of a leaf with all its matrix axes. Units that are cut alike form a group,
which travels in one exchange. A group is a table of `slots` rows and one column per owner: unit e lies in row
e // owners, column e % owners, except that the units of an incomplete last row may start at a later owner, which
is how groups of different cost are balanced against each other. Groups whose units hold matrices of one shape,
wide or tall, form a batch and are worked on together, so that a shape is compiled once.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from optax_muon.sharding._units import Axes, Kind, LeafSpec, matrices_of, size_of, turned, units_of

# Local bytes of one concatenated stack; a larger group is divided, which bounds what is alive at a time. A stack that
# is worked on where it lies is overwritten in place; one that travels in rounds needs a second one for the results.
STACK_BYTES = 1 << 30
TRAVELLING_STACK_BYTES = 512 << 20
# Local bytes of one exchange; a larger stack travels in rounds.
ROUND_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class Part:
    """`count` units of leaf number `leaf`, its `piece`-th stack of matrices; all of one kind of their group.

    `order` is the transposition of a unit's axes before it travels, () for none.
    """

    leaf: int
    piece: int
    count: int
    kind: int
    order: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Group:
    """Units whose pieces have one shape, which travel in one exchange.

    Attributes:
        kinds: how the units are laid out and cut: in a few ways, if pieces of equal shape belong to unlike cuts.
        matrices: (number, short side, long side) of the matrices in one unit, in the order of `to_matrices`.
        parts: the units, in order.
        owner_axes: mesh axes that cut the matrices: these exchange pieces.
        spread_axes: further mesh axes that share the work; the results are gathered over them.
        batch_axes: mesh axes that cut the stack: each of their shards is a problem of its own.
        piece: shape of one device's piece of one unit.
        wire_dtype: dtype name.
        varying: manual axes over which the units vary.
        owners: number of devices that share the units.
        slots: rows of the table.
        start: the owner at which the units of the last, incomplete row start.
        rounds: number of exchanges in each direction. Where there are several, the last one starts early enough
            to be full, and what it does twice comes out the same twice.
    """

    kinds: tuple[Kind, ...]
    matrices: tuple[tuple[int, int, int], ...]
    parts: tuple[Part, ...]
    owner_axes: Axes
    spread_axes: Axes
    batch_axes: Axes
    piece: tuple[int, ...]
    wire_dtype: str
    varying: Axes
    owners: int
    slots: int = 0
    start: int = 0
    rounds: int = 1

    @property
    def count(self) -> int:
        return sum(part.count for part in self.parts)

    @property
    def full(self) -> int:
        """Number of units before the last, incomplete row of a single round."""
        return self.count // self.owners * self.owners

    @property
    def local_bytes(self) -> int:
        """Bytes of one device's pieces of all units."""
        return self.count * _unit_bytes(self)

    def kinds_in_order(self) -> np.ndarray:
        """int32[count]: the kind of every unit."""
        return np.repeat([part.kind for part in self.parts], [part.count for part in self.parts]).astype(
            np.int32
        )

    def table(self) -> np.ndarray:
        """int32[slots, owners] of a single round: the kind of the unit in each slot, -1 where there is none."""
        kinds = self.kinds_in_order()
        table = np.full(self.slots * self.owners, -1, np.int32)
        table[: self.full] = kinds[: self.full]
        table[self.full + self.start :][: self.count - self.full] = kinds[self.full :]
        return table.reshape(self.slots, self.owners)

    def moved_bytes(self, sizes: dict[str, int]) -> int:
        """Bytes that one device puts on the wire and takes from it, both ways (output bytes of the collectives)."""
        row = _unit_bytes(self)
        pieces, spread = size_of(self.owner_axes, sizes), size_of(self.spread_axes, sizes)
        exchange = 2 * self.slots * pieces * row if pieces > 1 else 0
        return exchange + (self.slots * pieces * spread * row if spread > 1 else 0)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Groups that are worked on together, and (short side, long side, how many at a time) of their matrices."""

    groups: tuple[Group, ...]
    works: tuple[tuple[int, int, int], ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """All matrices of a tree on a mesh.

    Attributes:
        leaves: the leaves, in the order of the arrays.
        axes: (name, size) of the mesh axes, in mesh order; () without a mesh.
        batches: in the order in which they run.
        loads: matrix work of each device in mesh order, in the units of the cost function.
    """

    leaves: tuple[LeafSpec, ...]
    axes: tuple[tuple[str, int], ...]
    batches: tuple[Batch, ...]
    loads: tuple[float, ...]

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups."""
        return tuple(group for batch in self.batches for group in batch.groups)

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
    whole = _gather_units(leaves, sizes, spread)
    groups = [_fix_rows(part) for group in whole for part in _divide(group)]
    loads = np.zeros([size for _, size in axes] or [1])
    by_cost = sorted(range(len(groups)), key=lambda i: -_unit_cost(groups[i], cost))
    for i in by_cost:
        groups[i] = _place_last_row(groups[i], loads, axes, _unit_cost(groups[i], cost))
    return Plan(leaves, axes, tuple(_batches(groups, chunk)), tuple(loads.ravel().tolist()))


def _gather_units(leaves: Sequence[LeafSpec], sizes: dict[str, int], spread: Axes) -> list[Group]:
    """Units that travel alike, together (slots, start and rounds not fixed yet), in order of first appearance."""
    found: dict[tuple[Group, Kind | None], list[tuple[Kind, Part]]] = {}
    for i, leaf in enumerate(leaves):
        batch = leaf.view.batch_axes(len(leaf.shape))
        cut = {name: axis in batch for axis, names in enumerate(leaf.spec) for name in names}
        owner_axes = tuple(name for name in sizes if cut.get(name) is False)
        spread_axes = tuple(name for name in sizes if name in spread and name not in cut)
        for piece, (kind, count) in enumerate(units_of(leaf, sizes)):
            group = Group(
                kinds=(),
                matrices=matrices_of(kind),
                parts=(),
                owner_axes=owner_axes,
                spread_axes=spread_axes,
                batch_axes=tuple(name for name in sizes if cut.get(name) is True),
                piece=kind.local_shape(sizes),
                wire_dtype=leaf.wire_dtype,
                varying=leaf.varying,
                owners=size_of(owner_axes + spread_axes, sizes),
            )
            part = Part(i, piece, count, 0)
            # Blocks lie differently under different views though their pieces look alike.
            key = group, kind if kind.view.blocks else None
            other = turned(kind)
            if key not in found and other is not None:  # join those that lie the other way, if there are some
                turned_key = dataclasses.replace(group, piece=other[0].local_shape(sizes)), None
                if turned_key in found:
                    key, kind, part = turned_key, other[0], dataclasses.replace(part, order=other[1])
            found.setdefault(key, []).append((kind, part))
    groups = []
    for (group, _), units in found.items():
        kinds = tuple(dict.fromkeys(kind for kind, _ in units))
        parts = tuple(dataclasses.replace(part, kind=kinds.index(kind)) for kind, part in units)
        groups.append(dataclasses.replace(group, kinds=kinds, parts=parts))
    return groups


def _divide(group: Group) -> list[Group]:
    """Divides the parts so that no concatenated stack exceeds its limit; a single part is never divided."""
    unit = _unit_bytes(group)
    limit = _stack_limit(group)
    out: list[list[Part]] = [[]]
    total = 0
    for part in group.parts:
        if out[-1] and total + part.count * unit > limit:
            out.append([])
            total = 0
        out[-1].append(part)
        total += part.count * unit
    return [dataclasses.replace(group, parts=tuple(parts)) for parts in out]


def _fix_rows(group: Group) -> Group:
    """Fixes slots and rounds."""
    rows = -(-group.count // group.owners)
    at_once = max(1, ROUND_BYTES // (_unit_bytes(group) * group.owners)) if group.owners > 1 else rows
    at_once = even_turns(rows, at_once)
    rounds = -(-rows // at_once)
    return dataclasses.replace(group, slots=rounds * at_once, rounds=rounds)


def _batches(groups: Sequence[Group], chunk: Callable[[int, int], int]) -> list[Batch]:
    """Puts groups that share a matrix shape together, up to a limit of bytes; rounds go alone."""
    batches: list[list[Group]] = []
    for group in groups:
        joined = [group]
        for other in batches[:] if group.rounds == 1 else []:
            fits = sum(g.local_bytes for g in other + joined) <= _stack_limit(group)
            if fits and any(_alike(g, group) for g in other):
                batches.remove(other)
                joined = other + joined
        batches.append(joined)
    return [Batch(tuple(together), _works(together, chunk)) for together in batches]


def _alike(a: Group, b: Group) -> bool:
    """Whether two groups may be worked on together and hold matrices of a common shape."""
    if a.rounds > 1 or b.rounds > 1 or (a.wire_dtype, a.varying) != (b.wire_dtype, b.varying):
        return False
    return (a.owners > 1) == (b.owners > 1) and bool(
        {m[1:] for m in a.matrices} & {m[1:] for m in b.matrices}
    )


def _works(groups: Sequence[Group], chunk: Callable[[int, int], int]) -> tuple[tuple[int, int, int], ...]:
    shapes = dict.fromkeys((m, n) for group in groups for _, m, n in group.matrices)
    return tuple((m, n, max(1, chunk(m, n))) for m, n in shapes)


def even_turns(rows: int, limit: int) -> int:
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


def _stack_limit(group: Group) -> int:
    return STACK_BYTES if group.owners == 1 else TRAVELLING_STACK_BYTES


def _unit_cost(group: Group, cost: Callable[[int, int], float]) -> float:
    return math.fsum(number * cost(m, n) for number, m, n in group.matrices)


def _unit_bytes(group: Group) -> int:
    return math.prod(group.piece) * jnp.dtype(group.wire_dtype).itemsize
