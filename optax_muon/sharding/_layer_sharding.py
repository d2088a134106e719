"""Carries every matrix whole to one owner, lets a function work on it there, and carries the result back.

One joint all-to-all in and one out per group of the plan, in the wire dtype, which moves the least that can be moved.
The work between them has no collective. Without a mesh the same code runs with one owner and no exchange.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jaxtyping import Array, Shaped

from optax_muon.parameters import MatrixView, from_matrices, to_matrices
from optax_muon.sharding._buckets import Plan, make_plan
from optax_muon.sharding._exchange import Orthogonalize, Worker, empty, fill, kinds_here
from optax_muon.sharding._mesh import check_axes, check_not_shards, find_placement, guess_spec, varying_axes
from optax_muon.sharding._propagation import forward_only, lies_like
from optax_muon.sharding._units import LeafSpec, is_cut, unit_axes


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
    # A leaf without entries has nothing to orthogonalise.
    out = [leaf if leaf.size else leaf.astype(_result_dtype(leaf.dtype)) for leaf in leaves]
    live = [i for i, leaf in enumerate(leaves) if leaf.size]
    if not live:
        return out
    arrays, names, views = [leaves[i] for i in live], [paths[i] for i in live], [views[i] for i in live]
    said = None if param_specs is None else [param_specs[i] for i in live]
    check_not_shards(arrays, names, tuple(manual_batch_axes))
    placement = find_placement(arrays, names, said)
    check_axes(mesh_axes or (), "mesh_axes", placement)
    axes = placement.axes
    sharing = tuple(axis for axis in axes if mesh_axes is None or axis[0] in mesh_axes)
    specs = [
        spec if told else guess_spec(x.shape, view, sharing, spec, dict(axes))
        for x, view, spec, told in zip(arrays, views, placement.specs, placement.told, strict=True)
    ]
    if pmap_axis_name is not None:
        replicas = (pmap_axis_name, lax.axis_size(pmap_axis_name))
        axes, sharing = (*axes, replicas), (*sharing, replicas)
    facts = tuple(
        LeafSpec(name, x.shape, view, spec, _wire_dtype(wire_dtype, x.dtype), varying_axes(x))
        for name, x, view, spec in zip(names, arrays, views, specs, strict=True)
    )
    plan = make_plan(facts, axes, tuple(name for name, _ in sharing), cost, chunk)
    traced = any(isinstance(x, Tracer) for x in arrays)
    run = _run if traced else _run_compiled
    for i, y in zip(live, run(arrays, placement.told, plan, placement.mesh, orthogonalize), strict=True):
        out[i] = y
    return out


def _run(
    leaves: Sequence[Array], told: tuple[bool, ...], plan: Plan, mesh: Any, orthogonalize: Orthogonalize
) -> list[Array]:
    local = functools.partial(_on_each_device, plan, orthogonalize)
    inputs = [
        # Rounded before it may have to be moved to where it was guessed to be.
        x if known else forward_only(x.astype(leaf.wire_dtype))
        for x, leaf, known in zip(leaves, plan.leaves, told, strict=True)
    ]
    if mesh is not None:
        specs = tuple(PartitionSpec(*(names or None for names in leaf.spec)) for leaf in plan.leaves)
        free = {name for name, _ in plan.axes if name in mesh.axis_names}
        local = jax.shard_map(
            local, mesh=mesh, in_specs=specs, out_specs=specs, axis_names=free, check_vma=False
        )
    return [
        (y if known else lies_like(y, x)).astype(_result_dtype(x.dtype))
        for x, y, known in zip(leaves, local(*inputs), told, strict=True)
    ]


_run_compiled = jax.jit(_run, static_argnums=(1, 2, 3, 4))


def _on_each_device(plan: Plan, orthogonalize: Orthogonalize, *leaves: Array) -> tuple[Array, ...]:
    """The work of one device: [local leaf] -> [local leaf], the results in the wire dtype."""
    work = Worker(dict(plan.axes), orthogonalize)
    stacks = [_take_apart(leaf, x) for leaf, x in zip(plan.leaves, leaves, strict=True)]
    done: list[list[Any]] = [[None] * len(stack) for stack in stacks]
    for batch in plan.batches:
        rows = [
            [_turn(stacks[part.leaf][part.piece], part.order) for part in group.parts]
            for group in batch.groups
        ]
        if batch.groups[0].rounds > 1:
            results = [work.in_rounds(rows[0], batch)]
        else:
            tables = [fill(xs, group) for xs, group in zip(rows, batch.groups, strict=True)]
            tables = work.carry(tables, [kinds_here(group) for group in batch.groups], batch)
            results = [empty(table, group) for table, group in zip(tables, batch.groups, strict=True)]
        for group, ys in zip(batch.groups, results, strict=True):
            for part, y in zip(group.parts, ys, strict=True):
                done[part.leaf][part.piece] = _turn(y, np.argsort(part.order).tolist())
    return tuple(
        _put_together(leaf, ys, x.shape) for leaf, ys, x in zip(plan.leaves, done, leaves, strict=True)
    )


def _take_apart(leaf: LeafSpec, x: Array) -> list[Shaped[Array, "_ ..."]]:
    """A device's piece of a leaf as rows, one per unit (`units_of` gives the order)."""
    if is_cut(leaf):
        axes = unit_axes(leaf)
        return [x.transpose(*_batch(leaf), *axes).reshape(-1, *(x.shape[axis] for axis in axes))]
    return list(to_matrices(x, leaf.view))


def _put_together(leaf: LeafSpec, rows: Sequence[Array], shape: tuple[int, ...]) -> Array:
    """Inverse of `_take_apart`."""
    if is_cut(leaf):
        order = (*_batch(leaf), *unit_axes(leaf))
        x = rows[0].reshape([shape[axis] for axis in order])
        return x.transpose([order.index(axis) for axis in range(len(order))])
    return from_matrices(rows, leaf.view, shape)


def _turn(rows: Shaped[Array, "units ..."], order: Sequence[int]) -> Shaped[Array, "units ..."]:
    return rows.transpose(0, *(1 + axis for axis in order)) if len(order) else rows


def _batch(leaf: LeafSpec) -> tuple[int, ...]:
    return leaf.view.batch_axes(len(leaf.shape))


def _wire_dtype(wire_dtype: Any, dtype: Any) -> str:
    given: Any = (
        wire_dtype(dtype) if callable(wire_dtype) and not isinstance(wire_dtype, type) else wire_dtype
    )
    return jnp.dtype(given).name


def _result_dtype(dtype: Any) -> Any:
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32
