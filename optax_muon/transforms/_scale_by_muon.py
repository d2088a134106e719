"""Momentum and orthogonalisation. The only module that sees arrays, views and the sharding plan together."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_muon.orthogonalization import Orthogonalizer
from optax_muon.parameters import Rule, by_path
from optax_muon.sharding import is_spec, orthogonalize_leaves, platform_of, reshard_like
from optax_muon.transforms._checks import check_choice, check_float_dtype, check_instance, check_unit_interval
from optax_muon.transforms._momentum import (
    check_mu_dtype,
    on_mesh_of,
    read_momentum,
    write_momentum,
    zeros_momentum,
)
from optax_muon.transforms._views import ViewsOf, views_from_rules

Nesterov = Literal["torch", "optax"] | None


@dataclass(frozen=True)
class _OnPlatform:
    """An orthogonalizer on one platform, as the functions that the sharding layer takes."""

    orthogonalizer: Orthogonalizer
    platform: str | None

    def apply(self, x: jax.Array) -> jax.Array:
        return self.orthogonalizer.apply(x, self.platform)

    def flops(self, m: int, n: int) -> float:
        return self.orthogonalizer.flops(m, n, self.platform)

    def wire_dtype(self, dtype: Any) -> Any:
        return self.orthogonalizer.wire_dtype(dtype, self.platform)


# The same object for the same values: eager calls find their compiled program, and plans are made once.
_on_platform = functools.lru_cache(maxsize=None)(_OnPlatform)


class ScaleByMuonState(NamedTuple):
    """State of `scale_by_muon`: nothing but the momentum, so that recipes can change across a restore.

    Attributes:
      count: int32 scalar, updates done so far.
      mu: momentum, of the parameters' structure, shapes, shardings and (unless `mu_dtype` says otherwise)
        dtypes. With `mu_dtype='int8'` each leaf is a node with `values` and `scales`.
    """

    count: jax.typing.ArrayLike
    mu: Any


def accumulate(
    gradient: jax.Array, mu: jax.Array, momentum: Any, count: jax.Array, nesterov: Nesterov
) -> tuple[jax.Array, jax.Array]:
    """The new momentum and the direction to orthogonalise, both in at least float32.

    m <- b m + (1 - b) g, and the direction is m (None), (1 - b) g + b m ('torch'), or that with each term
    divided by its own bias, b m / (1 - b^(t+1)) + (1 - b) g / (1 - b^t) ('optax').
    """
    dtype = jnp.promote_types(jnp.float32, gradient.dtype)
    b = jnp.asarray(momentum, dtype)
    fresh = (1 - b) * gradient.astype(dtype)
    new = b * mu.astype(dtype) + fresh
    if nesterov is None:
        return new, new
    if nesterov == "torch":
        return new, fresh + b * new
    t = (count + 1).astype(dtype)
    return new, b * new / (1 - b ** (t + 1)) + fresh / (1 - b**t)


def scale_by_orthogonal_momentum(
    views_of: ViewsOf,
    *,
    momentum: Any,
    nesterov: Nesterov,
    orthogonalizer: Orthogonalizer,
    mu_dtype: Any,
    mesh_axes: Sequence[str] | None,
    param_specs: Any,
    wire_dtype: Any,
    pmap_axis_name: str | None,
    manual_batch_axes: Sequence[str],
) -> optax.GradientTransformationExtraArgs:
    """`scale_by_muon` with the views given."""

    def init(params: optax.Params) -> ScaleByMuonState:
        return ScaleByMuonState(
            count=on_mesh_of(jnp.zeros([], jnp.int32), params),
            mu=jax.tree.map(lambda p: zeros_momentum(p, mu_dtype), params),
        )

    def update(updates: optax.Updates, state: Any, params: Any = None, **extra_args: Any):
        del extra_args
        gradients, treedef = jax.tree.flatten(updates)
        paths_and_views = views_of(updates if params is None else params)
        b = momentum(state.count) if callable(momentum) else momentum
        stored = treedef.flatten_up_to(state.mu)
        # Momentum may be cut over more devices than its parameter (ZeRO-1): gradients come to it, updates go back.
        held = [read_momentum(m) for m in stored]
        moments = [
            accumulate(reshard_like(g, m), m, b, state.count, nesterov)
            for g, m in zip(gradients, held, strict=True)
        ]
        here = _on_platform(orthogonalizer, platform_of(gradients, param_specs))
        orthogonal = orthogonalize_leaves(
            [direction for _, direction in moments],
            [view for _, view in paths_and_views],
            [path for path, _ in paths_and_views],
            orthogonalize=here.apply,
            cost=here.flops,
            chunk=orthogonalizer.chunk,
            wire_dtype=wire_dtype or here.wire_dtype,
            mesh_axes=mesh_axes,
            param_specs=None
            if param_specs is None
            else by_path(param_specs, updates, "param_specs", is_spec),
            pmap_axis_name=pmap_axis_name,
            manual_batch_axes=tuple(manual_batch_axes),
        )
        homes = gradients if params is None else jax.tree.leaves(params)
        result = [
            reshard_like(x.astype(g.dtype), home)
            for x, g, home in zip(orthogonal, gradients, homes, strict=True)
        ]
        mu = [write_momentum(new, old) for (new, _), old in zip(moments, stored, strict=True)]
        return treedef.unflatten(result), ScaleByMuonState(
            count=optax.safe_increment(state.count), mu=treedef.unflatten(mu)
        )

    return optax.GradientTransformationExtraArgs(init, update)


def check_arguments(
    momentum: Any,
    nesterov: Any,
    orthogonalizer: Any,
    mu_dtype: Any,
    mesh_axes: Any,
    wire_dtype: Any,
    axes: Any,
) -> None:
    """Raises on a bad argument of `scale_by_muon` (or `muon`, which takes the same)."""
    check_unit_interval("momentum", momentum)
    check_choice("nesterov", nesterov, ("torch", "optax", None))
    check_instance("orthogonalizer", orthogonalizer, Orthogonalizer, "an optax_muon.Orthogonalizer")
    check_mu_dtype(mu_dtype)
    check_float_dtype(
        "wire_dtype",
        wire_dtype,
        refused=(jnp.float16,),
        why="a gradient may exceed its range before it is normalised; use jnp.bfloat16.",
    )
    for name, value in (("mesh_axes", mesh_axes), ("manual_batch_axes", axes)):
        if isinstance(value, str) or not (value is None or all(isinstance(axis, str) for axis in value)):
            raise TypeError(
                f"{name} must be a sequence of mesh axis names, such as ('data',), got {value!r}."
            )


def scale_by_muon(
    *,
    momentum: float | jax.Array | Callable[[jax.Array], Any] = 0.95,
    nesterov: Nesterov = "torch",
    orthogonalizer: Orthogonalizer = Orthogonalizer(),  # noqa: B008  (a frozen value)
    mu_dtype: Any = None,
    rules: Sequence[Rule] | None = None,
    mesh_axes: Sequence[str] | None = None,
    param_specs: Any = None,
    wire_dtype: Any = None,
    pmap_axis_name: str | None = None,
    manual_batch_axes: Sequence[str] = (),
) -> optax.GradientTransformationExtraArgs:
    r"""Momentum, then the nearest orthogonal matrix: Muon without learning rate, factor, decay or AdamW.

    Formula, for each matrix with gradient G and momentum M:

        M <- b M + (1 - b) G
        U = (1 - b) G + b M     (nesterov='torch')     U = M     (nesterov=None)
        update = msign(U), with msign(P S Q^T) = P p(S / |S|) Q^T

    where p is the composed polynomial of the orthogonalizer.

    Args:
      momentum: b in [0, 1), a number or a schedule of the step (from 0).
      nesterov: 'torch' (as torch.optim.Muon and Keller Jordan's), 'optax' (as optax.contrib.muon: both terms
        divided by their bias, 12 % away from 'torch' at step 2) or None.
      orthogonalizer: how the matrix is orthogonalised.
      mu_dtype: floating dtype in which the momentum is stored; None for each parameter's own; 'int8' for
        blocks along the last axis with a float32 scale each, in which every entry is off by at most 1/254 of
        the largest of its block. The arithmetic is float32.
      rules: rules that override the built-in ones, as in `muon`; every leaf must come out as a matrix.
      mesh_axes: the mesh axes over which matrices are spread; None for all of the mesh.
      param_specs: tree of PartitionSpec or NamedSharding, for Auto meshes, whose types do not tell the spec.
      wire_dtype: what a matrix is rounded to once before it is orthogonalised, with or without a mesh; None
        for the orthogonalizer's matmul dtype.
      pmap_axis_name: the axis of an enclosing pmap (or shard_map) over whose replicas the matrices are
        divided.
      manual_batch_axes: axes of an enclosing shard_map that shard batch axes (layers, experts), never a
        matrix.

    Returns:
      A `GradientTransformationExtraArgs` with state `ScaleByMuonState(count, mu)`. Updates have the shapes,
      dtypes and shardings of the gradients. Extra arguments of `update` are ignored.

    Raises:
      ValueError, TypeError: an argument out of its range, a leaf without a matrix view, a leaf that varies
      over a manual
        axis not in `manual_batch_axes` (a shard is not a matrix).

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_muon import scale_by_muon
      >>> transformation = scale_by_muon(momentum=0.0)
      >>> gradients = {"dense": {"kernel": jnp.diag(jnp.array([3.0, 2.0, 1.0]))}}
      >>> updates, _ = transformation.update(gradients, transformation.init(gradients))
      >>> bool(jnp.all(jnp.abs(jnp.diag(updates["dense"]["kernel"]) - 1) < 0.4))
      True

    Note:
      The cost of a T-step iteration on an n x m matrix (n <= m) is about T (4 n^2 m + 2 n^3) flops, spread
      over the mesh.

    References:
      Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024; Moonlight, arXiv
      2502.16982.
    """
    check_arguments(momentum, nesterov, orthogonalizer, mu_dtype, mesh_axes, wire_dtype, manual_batch_axes)
    return scale_by_orthogonal_momentum(
        views_from_rules("scale_by_muon", rules),
        momentum=momentum,
        nesterov=nesterov,
        orthogonalizer=orthogonalizer,
        mu_dtype=mu_dtype,
        mesh_axes=mesh_axes,
        param_specs=param_specs,
        wire_dtype=wire_dtype,
        pmap_axis_name=pmap_axis_name,
        manual_batch_axes=manual_batch_axes,
    )
