"""How optimizer state lies on a mesh: as its parameter, or cut further (ZeRO-1)."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array


def like_param(leaf: Array, param: Any) -> Array:
    """A state leaf of its parameter's shape, with the parameter's sharding.

    Under `jit` on an Auto mesh no type tells the sharding, so the leaf is made to depend on the parameter without
    taking anything from it, which lets the compiler carry the sharding over.

    Args:
        leaf: array of the parameter's shape, any dtype.
        param: the parameter.

    Returns:
        An array equal to `leaf`.
    """
    if not isinstance(param, jax.Array):
        return leaf
    if not isinstance(param, Tracer):
        return jax.device_put(leaf, param.sharding) if isinstance(param.sharding, NamedSharding) else leaf
    leaf = reshard_like(leaf, param)
    # Not `zeros_like(param)`, whose result the compiler knows to be independent of the parameter's sharding.
    never = jnp.zeros_like(param, dtype=bool)
    return jnp.where(never, param.astype(leaf.dtype), leaf)


def zeros_like_param(param: Any, dtype: Any = None) -> Array:
    """Zeros with the shape and sharding of a parameter; never whole on one device when the parameter is not."""
    dtype = dtype or param.dtype
    sharding = getattr(param, "sharding", None)
    if isinstance(param, jax.Array) and not isinstance(param, Tracer) and isinstance(sharding, NamedSharding):
        return jnp.zeros(param.shape, dtype, device=sharding)
    return like_param(jnp.zeros(param.shape, dtype), param)


def reshard_like(x: Array, param: Any) -> Array:
    """X where `param` lies: by its type on an Explicit mesh, by its placement if both are concrete.

    On an Auto mesh under `jit` neither tells anything, and x comes back as it is.
    """
    mine, theirs = jax.typeof(x).sharding, jax.typeof(param).sharding
    if not theirs.mesh.empty and AxisType.Explicit in theirs.mesh.axis_types:
        return x if mine == theirs else jax.sharding.reshard(x, theirs)
    place = getattr(param, "sharding", None)
    if isinstance(x, Tracer) or isinstance(param, Tracer) or not isinstance(place, NamedSharding):
        return x
    return x if x.sharding.is_equivalent_to(place, x.ndim) else jax.device_put(x, place)


def constrain(x: Array, spec: Any) -> Array:
    """X where a spec says, on an Auto mesh under `jit`; x itself elsewhere, where arrays and types tell.

    Args:
        x: any array.
        spec: PartitionSpec or NamedSharding.

    Returns:
        An array equal to x.
    """
    mesh = jax.typeof(x).sharding.mesh
    if not isinstance(x, Tracer) or mesh.empty or set(mesh.axis_types) != {AxisType.Auto}:
        return x
    spec = spec.spec if isinstance(spec, NamedSharding) else spec
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def shard_further(
    spec: PartitionSpec, shape: Sequence[int], axes: Sequence[str], sizes: dict[str, int]
) -> PartitionSpec:
    """The spec of a state leaf that is cut over more mesh axes than its parameter (ZeRO-1).

    The axes that the parameter does not use yet go together to the first dimension that they divide, preferably one
    that is still whole; where none can be divided the spec stays as it is.

    Args:
        spec: the parameter's spec.
        shape: the leaf's global shape.
        axes: mesh axes to add.
        sizes: sizes of all mesh axes.

    Returns:
        A PartitionSpec of full rank.

    Example:
        >>> tuple(shard_further(PartitionSpec(None, "model"), (512, 2048), ("data",), {"data": 4, "model": 2}))
        ('data', 'model')
    """
    entries = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec]
    entries += [()] * (len(shape) - len(entries))
    used = {name for names in entries for name in names}
    more = tuple(name for name in axes if name not in used)
    if more:
        for axis in sorted(range(len(shape)), key=lambda axis: bool(entries[axis])):
            if shape[axis] and shape[axis] % math.prod(sizes[n] for n in entries[axis] + more) == 0:
                entries[axis] += more
                break
    return PartitionSpec(*(names if len(names) > 1 else names[0] if names else None for names in entries))


def is_spec(x: Any) -> bool:
    """Whether x says how an array lies on a mesh: a leaf of a `param_specs` tree."""
    return isinstance(x, PartitionSpec | NamedSharding)
