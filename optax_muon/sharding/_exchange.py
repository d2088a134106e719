"""Tables of units on their way to their owners and back, and the work between, as one device sees it."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, Shaped

from optax_muon.parameters import from_matrices, to_matrices
from optax_muon.sharding._buckets import Batch, Group, even_turns
from optax_muon.sharding._mesh import varying_axes
from optax_muon.sharding._units import Kind

Orthogonalize: TypeAlias = Callable[[Array], Array]
Kinds: TypeAlias = Int[Array, "_"] | None


def fill(rows: Sequence[Shaped[Array, "_ ..."]], group: Group) -> Shaped[Array, "slots owners ..."]:
    """Lays rows into the table of a group; the incomplete last row of the table may cut one of the parts."""
    before, after, seen = [], [], 0
    for x in rows:
        x = x.astype(group.wire_dtype)
        cut = min(max(group.full - seen, 0), x.shape[0])
        seen += x.shape[0]
        if 0 < cut < x.shape[0]:
            before.append(x[:cut])
            after.append(x[cut:])
        else:
            (before if cut else after).append(x)
    rest = group.slots * group.owners - group.count - group.start
    pads = [[jnp.zeros((n, *group.piece), group.wire_dtype)] if n else [] for n in (group.start, rest)]
    table = _concatenate([*before, *pads[0], *after, *pads[1]])
    return table.reshape(group.slots, group.owners, *group.piece)


def empty(table: Shaped[Array, "slots owners ..."], group: Group) -> list[Shaped[Array, "_ ..."]]:
    """Inverse of `fill`."""
    flat, full, gap = table.reshape(-1, *group.piece), group.full, group.start
    pieces, taken = [], 0
    for part in group.parts:
        stop = taken + part.count
        head = (min(taken, full), min(stop, full))
        tail = (max(taken, full) + gap, max(stop, full) + gap)
        pieces.append([(first, last - first) for first, last in (head, tail) if last > first])
        taken = stop
    # Where a slice starts is hidden from the compiler, so that slices of one size are one kernel: XLA compiles every
    # static slice on CPU for itself, 18 ms each (216 of them: 4.5 s against .14 s).
    starts = iter(lax.optimization_barrier([np.uint32(first) for part in pieces for first, _ in part]))
    return [
        _concatenate([lax.dynamic_slice_in_dim(flat, next(starts), count) for _, count in part])
        for part in pieces
    ]


@dataclasses.dataclass(frozen=True)
class Worker:
    """Exchanges and works, given the sizes of the mesh axes."""

    sizes: dict[str, int]
    orthogonalize: Orthogonalize

    def in_rounds(self, rows: Sequence[Shaped[Array, "_ ..."]], batch: Batch) -> list[Shaped[Array, "_ ..."]]:
        """As many units at a time as one exchange may carry: temporaries do not grow with the stack."""
        (group,) = batch.groups
        length = group.slots // group.rounds * group.owners
        stack = rows[0] if len(rows) == 1 else jnp.concatenate([x.astype(group.wire_dtype) for x in rows])

        def turn(i: Array, done: Array) -> Array:
            start = jnp.minimum(i * length, group.count - length)
            table = lax.dynamic_slice_in_dim(stack, start, length).astype(group.wire_dtype)
            kinds = None
            if len(group.kinds) > 1:
                kinds = lax.dynamic_slice_in_dim(jnp.asarray(group.kinds_in_order()), start, length)
                kinds = _my_column(kinds.reshape(-1, group.owners), group)
            (table,) = self.carry([table.reshape(-1, group.owners, *group.piece)], [kinds], batch)
            return lax.dynamic_update_slice_in_dim(done, table.reshape(length, *group.piece), start, 0)

        done = lax.fori_loop(0, group.rounds, turn, jnp.zeros_like(stack, group.wire_dtype))
        starts = np.cumsum([0, *(part.count for part in group.parts)])
        return [done[start : start + part.count] for start, part in zip(starts, group.parts, strict=False)]

    def carry(
        self, tables: Sequence[Shaped[Array, "_ _ ..."]], kinds: Sequence[Kinds], batch: Batch
    ) -> list[Shaped[Array, "_ _ ..."]]:
        """Tables to their owners, work, and back: one loop per matrix shape."""
        groups = batch.groups
        units = [self.to_owners(table, group) for table, group in zip(tables, groups, strict=True)]
        matrices = [self.short_by_long(*args) for args in zip(units, kinds, groups, strict=True)]
        for short, long, chunk in batch.works:
            where = [
                (i, j)
                for i, g in enumerate(groups)
                for j, m in enumerate(g.matrices)
                if m[1:] == (short, long)
            ]
            stack = _concatenate([matrices[i][j] for i, j in where])
            marks = None
            if any(_has_gaps(groups[i]) for i, _ in where):
                marks = _concatenate([_marks(kinds[i], matrices[i][j], groups[i], j) for i, j in where])
            stack = self.work(stack, marks, chunk)
            taken = 0
            for i, j in where:
                count = matrices[i][j].shape[0]
                matrices[i][j] = stack[taken : taken + count]
                taken += count
        units = [self.whole_units(*args) for args in zip(matrices, kinds, groups, strict=True)]
        return [self.from_owners(x, group) for x, group in zip(units, groups, strict=True)]

    def to_owners(
        self, table: Shaped[Array, "rows owners ..."], group: Group
    ) -> Shaped[Array, "rows pieces ..."]:
        """Every owner receives all pieces of its units."""
        spread, cut = self._size(group.spread_axes), self._size(group.owner_axes)
        x = table.reshape(-1, spread, cut, *group.piece)
        x = (
            x[:, 0]
            if spread == 1
            else lax.dynamic_index_in_dim(x, lax.axis_index(group.spread_axes), 1, False)
        )
        return lax.all_to_all(x, group.owner_axes, 1, 1, tiled=True) if cut > 1 else x

    def from_owners(
        self, x: Shaped[Array, "rows pieces ..."], group: Group
    ) -> Shaped[Array, "rows owners ..."]:
        """Inverse of `to_owners`; all devices of the spread axes get the results of all."""
        spread, cut = self._size(group.spread_axes), self._size(group.owner_axes)
        x = lax.all_to_all(x, group.owner_axes, 1, 1, tiled=True) if cut > 1 else x
        if spread == 1:
            x = x[:, None]
        else:  # inside a shard_map that checks types, the result must count as equal on all replicas
            to = "invarying" if set(group.spread_axes) <= set(varying_axes(x)) else "varying"
            x = lax.all_gather(x, group.spread_axes, axis=1, to=to)
        return x.reshape(-1, spread * cut, *group.piece)

    def work(
        self, stack: Shaped[Array, "_ short long"], marks: Bool[Array, "_"] | None, chunk: int
    ) -> Shaped[Array, "_ short long"]:
        """Orthogonalises a few matrices at a time, in place, and skips what no mark says is there."""
        count = stack.shape[0]
        chunk = even_turns(count, chunk)
        turns = -(-count // chunk)
        extra = turns * chunk - count
        if extra:
            stack = jnp.concatenate([stack, jnp.zeros((extra, *stack.shape[1:]), stack.dtype)])
            marks = None if marks is None else jnp.concatenate([marks, jnp.zeros(extra, bool)])

        def one(x: Array) -> Array:
            return self.orthogonalize(x).astype(x.dtype)

        def turn(i: Any, stack: Array) -> Array:
            x = lax.dynamic_slice_in_dim(stack, i * chunk, chunk)
            if marks is None:
                x = one(x)
            else:
                here = lax.dynamic_slice_in_dim(marks, i * chunk, chunk).any()
                x = lax.cond(here, one, lambda x: x, x)
            return lax.dynamic_update_slice_in_dim(stack, x, i * chunk, 0)

        stack = turn(0, stack) if turns == 1 else lax.fori_loop(0, turns, turn, stack)
        return stack[:count]

    def short_by_long(
        self, units: Shaped[Array, "rows pieces ..."], kinds: Kinds, group: Group
    ) -> list[Shaped[Array, "_ _ _"]]:
        """The matrices of whole units, the short side first: one stack per entry of `group.matrices`."""

        def one(kind: Kind, unit: Array) -> tuple[Array, ...]:
            whole = _join(unit, kind, group.owner_axes, self.sizes)
            return tuple(x if x.shape[1] <= x.shape[2] else x.mT for x in to_matrices(whole, kind.view))

        return [x.reshape(-1, *x.shape[2:]) for x in _by_kind(one, group.kinds, kinds, units)]

    def whole_units(
        self, matrices: Sequence[Shaped[Array, "_ _ _"]], kinds: Kinds, group: Group
    ) -> Shaped[Array, "rows pieces ..."]:
        """Inverse of `short_by_long`."""

        def one(kind: Kind, matrices: Sequence[Array]) -> Array:
            shapes = kind.view.matrix_shapes(kind.shape)
            upright = [x if s.fan_in <= s.fan_out else x.mT for x, s in zip(matrices, shapes, strict=True)]
            pieces = _split(from_matrices(upright, kind.view, kind.shape), kind, group.owner_axes, self.sizes)
            return pieces.reshape(-1, *group.piece)

        per_unit = [x.reshape(-1, m[0], *x.shape[1:]) for x, m in zip(matrices, group.matrices, strict=True)]
        return _by_kind(one, group.kinds, kinds, per_unit)

    def _size(self, axes: Sequence[str]) -> int:
        return math.prod(self.sizes[name] for name in axes)


def kinds_here(group: Group) -> Kinds:
    """The kind of the unit in each slot of this device, -1 for none; None if one kind fills all slots."""
    if len(group.kinds) == 1 and not _has_gaps(group):
        return None
    return _my_column(jnp.asarray(group.table()), group)


def _my_column(table: Int[Array, "slots owners"], group: Group) -> Int[Array, "slots"]:
    axes = group.spread_axes + group.owner_axes
    return table[:, lax.axis_index(axes) if axes else 0]


def _has_gaps(group: Group) -> bool:
    """Whether some device has an empty slot."""
    return group.rounds == 1 and group.count < group.slots * group.owners


def _marks(kinds: Kinds, matrices: Shaped[Array, "_ _ _"], group: Group, piece: int) -> Bool[Array, "_"]:
    """Which of the matrices are there."""
    return (
        jnp.ones(matrices.shape[0], bool)
        if kinds is None
        else jnp.repeat(kinds >= 0, group.matrices[piece][0])
    )


def _by_kind(one: Callable[[Kind, Any], Any], kinds: Sequence[Kind], here: Kinds, rows: Any) -> Any:
    """Applies `one` to every row with the row's kind."""
    branches = [functools.partial(one, kind) for kind in kinds]
    if len(branches) == 1 or here is None:
        return jax.vmap(branches[0])(rows)
    if here.shape[0] > 1:
        return lax.map(lambda row: lax.switch(row[0], branches, row[1]), (here, rows))
    out = lax.switch(here[0], branches, jax.tree.map(lambda x: x[0], rows))
    return jax.tree.map(lambda x: x[None], out)


def _concatenate(parts: Sequence[Array]) -> Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _join(
    unit: Shaped[Array, "pieces ..."], kind: Kind, owner_axes: tuple[str, ...], sizes: dict[str, int]
) -> Array:
    """All devices' pieces of one unit, in mesh order -> the whole unit."""
    x = unit.reshape([sizes[name] for name in owner_axes] + list(kind.local_shape(sizes)))
    return x.transpose(_whole_order(kind, owner_axes)).reshape(kind.shape)


def _split(whole: Array, kind: Kind, owner_axes: tuple[str, ...], sizes: dict[str, int]) -> Array:
    """Inverse of `_join`, the axes of the mesh still apart."""
    order = _whole_order(kind, owner_axes)
    dims = [sizes[name] for name in owner_axes] + list(kind.local_shape(sizes))
    x = whole.reshape([dims[axis] for axis in order])
    return x.transpose([order.index(axis) for axis in range(len(order))])


def _whole_order(kind: Kind, owner_axes: tuple[str, ...]) -> list[int]:
    """The transposition that puts before every local dimension the mesh axes that cut it, major to minor."""
    order = []
    for axis, names in enumerate(kind.cut):
        order += [owner_axes.index(name) for name in names] + [len(owner_axes) + axis]
    return order
