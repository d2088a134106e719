"""Carries every matrix whole to one owner, lets a function work on it there, and carries the result back.

One joint all-to-all in and one out per group of the plan, in the wire dtype, which moves the least that can be moved.
The work between them has no collective. Without a mesh the same code runs with one owner and no exchange.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int, Shaped

from optax_muon.parameters import MatrixView, from_matrices, to_matrices
from optax_muon.sharding._buckets import Group, Kind, LeafSpec, Plan, make_plan
from optax_muon.sharding._mesh import check_axes, check_not_shards, find_placement, guess_spec, varying_axes
from optax_muon.sharding._propagation import forward_only, lies_like

Orthogonalize: TypeAlias = Callable[[Array], Array]


def orthogonalize_leaves(
    leaves: Sequence[Array],
    views: Sequence[MatrixView],
    paths: Sequence[str],
    *,
    orthogonalize: Orthogonalize,
    cost: Callable[[int, int], float],
    chunk: Callable[[int, int], int],
    wire_dtype: Any,
    mesh_axes: Sequence[str] | None = None,
    param_specs: Sequence[Any] | None = None,
    pmap_axis_name: str | None = None,
    manual_batch_axes: Sequence[str] = (),
) -> list[Array]:
    """Orthogonalises every matrix of every leaf, each as a whole, wherever its pieces lie.

    Args:
        leaves: floating arrays of any rank.
        views: one resolved MatrixView per leaf.
        paths: one path per leaf, for messages.
        orthogonalize: [b, m, n] -> [b, m, n] with m <= n, each matrix alone. Zero must map to zero. In eager calls
            it must be hashable; calls with equal functions share one compiled program.
        cost: work of one (m, n) matrix in any unit, for balancing.
        chunk: how many (m, n) matrices to hand over at a time.
        wire_dtype: the dtype to which matrices are rounded, with or without a mesh; or a function that gives it
            from the leaf's dtype.
        mesh_axes: the mesh axes that may share work beside those that cut the matrices; None means all.
        param_specs: one PartitionSpec, NamedSharding or None per leaf, read on Auto meshes under `jit`.
        pmap_axis_name: an axis of `pmap` over whose replicas the matrices are divided.
        manual_batch_axes: manual mesh axes of the user's `shard_map` that cut layers or experts.

    Returns:
        Arrays of the leaves' shapes and shardings; dtype promote(float32, leaf dtype).

    Raises:
        ValueError: a leaf that is a shard, leaves on different meshes, specs or axis names that do not fit.
    """
    out = [leaf.astype(_result_dtype(leaf.dtype)) for leaf in leaves]
    live = [i for i, leaf in enumerate(leaves) if leaf.size]
    if not live:
        return out
    arrays, names, views = ([values[i] for i in live] for values in (leaves, paths, views))
    said = None if param_specs is None else [param_specs[i] for i in live]
    check_not_shards(arrays, names, tuple(manual_batch_axes))
    placement = find_placement(arrays, names, said)
    check_axes(mesh_axes or (), "mesh_axes", placement)
    axes = placement.axes
    sharing = tuple(axis for axis in axes if mesh_axes is None or axis[0] in mesh_axes)
    guessed = tuple(spec is None for spec in placement.specs)
    specs = [
        guess_spec(x.shape, view, sharing) if spec is None else spec
        for x, view, spec in zip(arrays, views, placement.specs, strict=True)
    ]
    if pmap_axis_name is not None:
        replicas = (pmap_axis_name, lax.axis_size(pmap_axis_name))
        axes, sharing = (*axes, replicas), (*sharing, replicas)
    facts = tuple(
        LeafSpec(name, x.shape, view, spec, _wire_dtype(wire_dtype, x.dtype), varying_axes(x))
        for name, x, view, spec in zip(names, arrays, views, specs, strict=True)
    )
    plan = make_plan(facts, axes, tuple(name for name, _ in sharing), cost, chunk)
    traced = any(isinstance(x, jax.core.Tracer) for x in arrays)
    run = _run if traced else _run_compiled
    for i, y in zip(live, run(arrays, guessed, plan, placement.mesh, orthogonalize), strict=True):
        out[i] = y
    return out


def _run(
    leaves: Sequence[Array], guessed: tuple[bool, ...], plan: Plan, mesh: Any, orthogonalize: Orthogonalize
) -> list[Array]:
    local = functools.partial(_on_each_device, plan, orthogonalize)
    inputs = [
        # Rounded before it may have to be moved to where it was guessed to be.
        forward_only(x.astype(leaf.wire_dtype)) if guess else x
        for x, leaf, guess in zip(leaves, plan.leaves, guessed, strict=True)
    ]
    if mesh is not None:
        specs = tuple(PartitionSpec(*(names or None for names in leaf.spec)) for leaf in plan.leaves)
        free = {name for name, _ in plan.axes if name in mesh.axis_names}
        local = jax.shard_map(
            local, mesh=mesh, in_specs=specs, out_specs=specs, axis_names=free, check_vma=False
        )
    return [
        (lies_like(y, x) if guess else y).astype(_result_dtype(x.dtype))
        for x, y, guess in zip(leaves, local(*inputs), guessed, strict=True)
    ]


_run_compiled = jax.jit(_run, static_argnums=(1, 2, 3, 4))


def _on_each_device(plan: Plan, orthogonalize: Orthogonalize, *leaves: Array) -> tuple[Array, ...]:
    """The work of one device: [local leaf] -> [local leaf], the results in the wire dtype."""
    sizes = dict(plan.axes)
    stacks = [_take_apart(leaf, x) for leaf, x in zip(plan.leaves, leaves, strict=True)]
    done: list[list[Any]] = [[None] * len(stack) for stack in stacks]
    for group in plan.groups:
        rows = [stacks[part.leaf][part.piece].reshape(-1, *group.piece) for part in group.parts]
        carry = _in_one_round if group.rounds == 1 else _in_rounds
        for part, y in zip(group.parts, carry(rows, group, sizes, orthogonalize), strict=True):
            done[part.leaf][part.piece] = y
    return tuple(
        _put_together(leaf, ys, x.shape) for leaf, ys, x in zip(plan.leaves, done, leaves, strict=True)
    )


def _take_apart(leaf: LeafSpec, x: Array) -> list[Shaped[Array, "units ..."]]:
    """A device's piece of a leaf as rows, one per unit (`units_of` gives the order)."""
    batch, rest = _axes(leaf)
    if any(leaf.spec[axis] for axis in rest):
        return [x.transpose(*batch, *rest).reshape(-1, *(x.shape[axis] for axis in rest))]
    return list(to_matrices(x, leaf.view))


def _put_together(leaf: LeafSpec, rows: Sequence[Array], shape: tuple[int, ...]) -> Array:
    """Inverse of `_take_apart`."""
    batch, rest = _axes(leaf)
    if any(leaf.spec[axis] for axis in rest):
        order = (*batch, *rest)
        x = rows[0].reshape([shape[axis] for axis in order])
        return x.transpose([order.index(axis) for axis in range(len(order))])
    sides = leaf.view.matrix_shapes(shape)
    matrices = [y.reshape(s.count, s.fan_in, s.fan_out) for y, s in zip(rows, sides, strict=True)]
    return from_matrices(matrices, leaf.view, shape)


def _axes(leaf: LeafSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    batch = leaf.view.batch_axes(len(leaf.shape))
    return batch, tuple(axis for axis in range(len(leaf.shape)) if axis not in batch)


def _in_one_round(
    rows: Sequence[Shaped[Array, "_ ..."]], group: Group, sizes: dict[str, int], orthogonalize: Orthogonalize
) -> list[Shaped[Array, "_ ..."]]:
    """Lays the rows into the table of the group, lets it travel once, and takes the rows out again."""
    left, after, before = group.count - group.full, [], []
    seen = 0
    for x in rows:  # the incomplete last row of the table may cut one of the parts
        cut = min(max(group.full - seen, 0), x.shape[0])
        seen += x.shape[0]
        before += [x[:cut].astype(group.wire_dtype)] if cut else []
        after += [x[cut:].astype(group.wire_dtype)] if cut < x.shape[0] else []
    gap, rest = group.start, group.slots * group.owners - group.full - group.start - left
    pads = [[jnp.zeros((n, *group.piece), group.wire_dtype)] if n else [] for n in (gap, rest)]
    parts = [*before, *pads[0], *after, *pads[1]]
    table = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    table = table.reshape(group.slots, group.owners, *group.piece)
    table = _exchange_and_work(table, _my_column(group.table(), group), group, sizes, orthogonalize)

    flat, out, taken = table.reshape(-1, *group.piece), [], 0
    for part in group.parts:
        stop = taken + part.count
        head = flat[min(taken, group.full) : min(stop, group.full)]
        tail = flat[max(taken, group.full) + gap : max(stop, group.full) + gap]
        out.append(
            head if stop <= group.full else tail if taken >= group.full else jnp.concatenate([head, tail])
        )
        taken = stop
    return out


def _in_rounds(
    rows: Sequence[Shaped[Array, "_ ..."]], group: Group, sizes: dict[str, int], orthogonalize: Orthogonalize
) -> list[Shaped[Array, "_ ..."]]:
    """As many units at a time as one exchange may carry, so that temporaries do not grow with the stack."""
    length = group.slots // group.rounds * group.owners
    stack = rows[0] if len(rows) == 1 else jnp.concatenate([x.astype(group.wire_dtype) for x in rows])
    kinds = jnp.asarray(group.kinds_in_order())

    def turn(i: Array, done: Array) -> Array:
        start = jnp.minimum(i * length, group.count - length)
        table = lax.dynamic_slice_in_dim(stack, start, length).astype(group.wire_dtype)
        mine = lax.dynamic_slice_in_dim(kinds, start, length).reshape(-1, group.owners)
        table = table.reshape(-1, group.owners, *group.piece)
        table = _exchange_and_work(table, _my_column(mine, group), group, sizes, orthogonalize)
        return lax.dynamic_update_slice_in_dim(done, table.reshape(length, *group.piece), start, 0)

    done = lax.fori_loop(0, group.rounds, turn, jnp.zeros_like(stack, group.wire_dtype))
    starts = np.cumsum([0, *(part.count for part in group.parts)])
    return [done[start : start + part.count] for start, part in zip(starts, group.parts, strict=False)]


def _my_column(table: Any, group: Group) -> Int[Array, "slots"]:
    """The entries of this device in a table [slots, owners]."""
    axes = group.spread_axes + group.owner_axes
    return jnp.asarray(table)[:, lax.axis_index(axes) if axes else 0]


def _exchange_and_work(
    table: Shaped[Array, "rows owners ..."],
    kinds: Int[Array, "rows"],
    group: Group,
    sizes: dict[str, int],
    orthogonalize: Orthogonalize,
) -> Shaped[Array, "rows owners ..."]:
    """Exchange, work on whole matrices, exchange back."""
    spread, cut = (math.prod(sizes[name] for name in axes) for axes in (group.spread_axes, group.owner_axes))
    x = table.reshape(-1, spread, cut, *group.piece)
    x = x[:, 0] if spread == 1 else lax.dynamic_index_in_dim(x, lax.axis_index(group.spread_axes), 1, False)
    if cut > 1:
        x = lax.all_to_all(x, group.owner_axes, 1, 1, tiled=True)
    x = _work(x, kinds, group, sizes, orthogonalize)
    if cut > 1:
        x = lax.all_to_all(x, group.owner_axes, 1, 1, tiled=True)
    if spread == 1:
        x = x[:, None]
    else:  # inside a shard_map that checks types, the result must count as equal on all replicas
        to = "invarying" if set(group.spread_axes) <= set(varying_axes(x)) else "varying"
        x = lax.all_gather(x, group.spread_axes, axis=1, to=to)
    return x.reshape(-1, spread * cut, *group.piece)


def _work(
    stack: Shaped[Array, "rows pieces ..."],
    kinds: Int[Array, "rows"],
    group: Group,
    sizes: dict[str, int],
    orthogonalize: Orthogonalize,
) -> Shaped[Array, "rows pieces ..."]:
    """Every row is all pieces of one unit; a few rows at a time, in place, skipping what is empty."""
    some_empty = group.owners > 1 and group.rounds == 1 and group.count < group.slots * group.owners
    n = stack.shape[0] // group.chunk

    def work(units: Array, kinds: Array) -> Array:
        matrices = _to_short_by_long(units, kinds, group, sizes)
        done = [orthogonalize(x.reshape(-1, *x.shape[2:])).reshape(x.shape) for x in matrices]
        return _from_short_by_long([y.astype(units.dtype) for y in done], kinds, group, sizes)

    def turn(i: Any, stack: Array) -> Array:
        units = lax.dynamic_slice_in_dim(stack, i * group.chunk, group.chunk)
        mine = lax.dynamic_slice_in_dim(kinds, i * group.chunk, group.chunk)
        if some_empty:
            units = lax.cond((mine >= 0).any(), work, lambda units, _: units, units, mine)
        else:
            units = work(units, mine)
        return lax.dynamic_update_slice_in_dim(stack, units, i * group.chunk, 0)

    return turn(0, stack) if n == 1 else lax.fori_loop(0, n, turn, stack)


def _to_short_by_long(
    units: Shaped[Array, "rows pieces ..."], kinds: Int[Array, "rows"], group: Group, sizes: dict[str, int]
) -> list[Shaped[Array, "rows _ _ _"]]:
    """The matrices of whole units, the short side first: one array per entry of `group.matrices`."""

    def one(kind: Kind, unit: Array) -> tuple[Array, ...]:
        whole = _join(unit, kind, group.owner_axes, sizes)
        matrices = (whole[None],) if kind.view is None else to_matrices(whole, kind.view)
        return tuple(x if x.shape[1] <= x.shape[2] else x.mT for x in matrices)

    return list(_by_kind([functools.partial(one, kind) for kind in group.kinds], kinds, units))


def _from_short_by_long(
    matrices: Sequence[Shaped[Array, "rows _ _ _"]],
    kinds: Int[Array, "rows"],
    group: Group,
    sizes: dict[str, int],
) -> Shaped[Array, "rows pieces ..."]:
    """Inverse of `_to_short_by_long`."""

    def one(kind: Kind, matrices: Sequence[Array]) -> Array:
        view = kind.view or MatrixView((0,), (1,))
        shapes = view.matrix_shapes(kind.shape)
        upright = [x if s.fan_in <= s.fan_out else x.mT for x, s in zip(matrices, shapes, strict=True)]
        pieces = _split(from_matrices(upright, view, kind.shape), kind, group.owner_axes, sizes)
        return pieces.reshape(-1, *group.piece)

    return _by_kind([functools.partial(one, kind) for kind in group.kinds], kinds, list(matrices))


def _by_kind(branches: Sequence[Callable[[Any], Any]], kinds: Int[Array, "rows"], rows: Any) -> Any:
    """Applies to every row the branch of its kind."""
    if len(branches) == 1:
        return jax.vmap(branches[0])(rows)
    if kinds.shape[0] == 1:  # a real switch; vmapped it would compute every branch
        out = lax.switch(kinds[0], branches, jax.tree.map(lambda x: x[0], rows))
        return jax.tree.map(lambda x: x[None], out)
    return jax.vmap(lambda kind, row: lax.switch(kind, branches, row))(kinds, rows)


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


def _wire_dtype(wire_dtype: Any, dtype: Any) -> str:
    given = wire_dtype(dtype) if callable(wire_dtype) and not isinstance(wire_dtype, type) else wire_dtype
    return jnp.dtype(given).name


def _result_dtype(dtype: Any) -> Any:
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32
