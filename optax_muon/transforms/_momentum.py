"""How momentum is stored: as an array of some floating dtype, or as int8 with a scale for every block.

Everything that depends on the storage is here. The rest of the package asks for `zeros_momentum`,
`read_momentum` and `write_momentum`, and treats one stored momentum as one leaf (`is_momentum`).
"""

import math
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from optax_muon.sharding import like_param, zeros_like_param
from optax_muon.transforms._checks import check_float_dtype

# The last axis is halved as long as blocks keep this many entries: enough blocks to be cut by any usual mesh,
# and a scale of four bytes for 64 entries is 1/64 of the float32 momentum.
SMALLEST_BLOCK = 64
LARGEST_BLOCK = 2048
_STEPS = 127


class Int8Momentum(NamedTuple):
    """A momentum in int8: `values / 127 * scales`, blockwise along the last axis.

    Attributes:
        values: int8, shape and sharding of the parameter.
        scales: float32, the largest magnitude of each block; the parameter's shape but for the last axis,
            which counts blocks; sharded as the parameter.
    """

    values: Any
    scales: Any


Momentum: TypeAlias = Array | Int8Momentum


def is_momentum(x: Any) -> bool:
    """Whether x is a stored momentum that jax.tree would take apart."""
    return isinstance(x, Int8Momentum)


def check_mu_dtype(value: Any) -> None:
    """Raises unless the value is None, 'int8' or a real floating dtype."""
    if not stores_int8(value):
        check_float_dtype("mu_dtype", value, other="'int8'")


def stores_int8(mu_dtype: Any) -> bool:
    """Whether this `mu_dtype` means blockwise int8."""
    try:
        return mu_dtype is not None and jnp.dtype(mu_dtype) == jnp.int8
    except TypeError:
        return False


def zeros_momentum(param: Any, mu_dtype: Any = None) -> Momentum:
    """The momentum of a parameter before the first step.

    Args:
        param: array, tracer or ShapeDtypeStruct under `eval_shape`.
        mu_dtype: a floating dtype, None for the parameter's, or 'int8'.

    Returns:
        Zeros with the parameter's shape and sharding.
    """
    if not stores_int8(mu_dtype):
        return zeros_like_param(param, mu_dtype)
    *rest, side = param.shape
    spec = _spec_of(param)
    shape = (*rest, block_count(side, 1 if spec is None else _parts(spec, len(param.shape))))
    values = zeros_like_param(param, jnp.int8)
    if not isinstance(param, Tracer):
        return Int8Momentum(values, jnp.zeros(shape, jnp.float32, device=spec))
    # Made from the parameter, from which alone the compiler knows where the scales belong.
    largest = _largest(param.astype(jnp.float32), shape[-1])
    return Int8Momentum(values, like_param(jnp.zeros(shape, jnp.float32), largest))


def on_mesh_of(x: Array, params: Any) -> Array:
    """A counter, or another state that belongs to no parameter, replicated over the mesh of the parameters.

    Left where JAX puts a new scalar, it would come back from the first step with another type, and the second
    step would be compiled anew. Under `jit` the compiler places it.
    """
    for param in jax.tree.leaves(params):
        sharding = None if isinstance(param, Tracer) else getattr(param, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(param, jax.Array):
            return jax.device_put(x, NamedSharding(sharding.mesh, PartitionSpec()))
    return x


def read_momentum(stored: Momentum) -> Float[Array, "..."]:
    """The momentum as a floating array of the parameter's shape: float32 if it was stored in int8."""
    if not isinstance(stored, Int8Momentum):
        return stored
    blocks = _blocks(stored.values.astype(jnp.float32), stored.scales.shape[-1])
    return _unblock(blocks / _STEPS * stored.scales[..., None], stored.values)


def write_momentum(momentum: Float[Array, "..."], like: Momentum) -> Momentum:
    """Stores a momentum as the one before it was stored.

    In int8 an entry of a block whose largest magnitude is a is off by at most a/254 (and float32 rounding).
    A block of zeros is exact. A block with a NaN or an infinity reads as NaN throughout: what is wrong stays
    visible.

    Args:
        momentum: floating, of the parameter's shape.
        like: a stored momentum of the same parameter.

    Returns:
        A stored momentum of the same structure, dtypes and shapes.
    """
    if not isinstance(like, Int8Momentum):
        return momentum.astype(like.dtype)
    momentum = momentum.astype(jnp.float32)
    count = like.scales.shape[-1]
    scales = _largest(momentum, count)
    usable = jnp.isfinite(scales) & (scales > 0)
    unit = _blocks(momentum, count) / jnp.where(usable, scales, 1)[..., None]
    steps = jnp.where(usable[..., None], jnp.round(unit * _STEPS), 0)
    scales = jnp.where(jnp.isfinite(scales), scales, jnp.nan)
    return Int8Momentum(_unblock(steps.astype(jnp.int8), like.values), scales)


def block_count(side: int, parts: int = 1) -> int:
    """Into how many blocks the last axis is divided.

    A power of two where possible, and the same on every mesh that divides it, so that a state can move
    between meshes; where a mesh cuts the axis in another way, blocks of its own that do not cross shards.

    Args:
        side: length of the last axis.
        parts: into how many shards it is cut.

    Returns:
        The number of blocks: each has at most 2048 entries, and lies within one shard.

    Example:
        >>> block_count(4096), block_count(11008, 8), block_count(3072, 3), block_count(10)
        (64, 128, 48, 1)
    """
    count = _halvings(side)
    count *= max(1, math.ceil(side // count / LARGEST_BLOCK))
    if parts > 1 and math.gcd(side, count) % parts:
        return parts * block_count(side // parts)
    return count


def _halvings(side: int) -> int:
    count = 1
    while side % 2 == 0 and side // 2 >= SMALLEST_BLOCK:
        side //= 2
        count *= 2
    return count


def _blocks(x: Array, count: int) -> Array:
    """[..., side] -> [..., count, block]; where the blocks are uneven, zeros fill the last one."""
    *rest, side = x.shape
    even = math.gcd(side, count) if side else count
    if even == count:
        return _reshape(x, (*rest, count, side // count), (*_entries(x), None))
    # An axis that only `even` divides is cut at most so often: the padded axis is whole on every device.
    x = _reshape(x, (*rest, even, side // even), (*_entries(x), None))
    more = count // even
    block = math.ceil(x.shape[-1] / more)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more * block - x.shape[-1])])
    return _reshape(x, (*rest, count, block), _entries(x))


def _unblock(blocks: Array, like: Array) -> Array:
    """Inverse of `_blocks`, with the shape and sharding of `like`."""
    *rest, side = like.shape
    count = blocks.shape[-2]
    even = math.gcd(side, count) if side else count
    if even != count:
        shape = (*rest, even, count // even * blocks.shape[-1])
        blocks = _reshape(blocks, shape, (*_entries(like), None))[..., : side // even]
    return _reshape(blocks, like.shape, _entries(like))


def _largest(x: Float[Array, "*rest side"], count: int) -> Float[Array, "*rest count"]:
    return jnp.max(jnp.abs(_blocks(x, count)), axis=-1, initial=0)


def _reshape(x: Array, shape: tuple[int, ...], entries: tuple[Any, ...]) -> Array:
    """A reshape that splits or joins the last axis; in Explicit mode the result's sharding has to be said."""
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty or AxisType.Explicit not in mesh.axis_types:
        return x.reshape(shape)
    return lax.reshape(x, shape, out_sharding=NamedSharding(mesh, PartitionSpec(*entries)))


def _entries(x: Array) -> tuple[Any, ...]:
    """The Explicit sharding in the type of x, one entry per axis."""
    spec = jax.typeof(x).sharding.spec
    return (*spec, *[None] * (x.ndim - len(spec)))


def _spec_of(param: Any) -> NamedSharding | None:
    """The sharding of a parameter, as far as it is known: of arrays, and under `jit` in Explicit mode."""
    if isinstance(param, Tracer):
        sharding = jax.typeof(param).sharding
        return None if sharding.mesh.empty else sharding
    sharding = getattr(param, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def _parts(sharding: NamedSharding, ndim: int) -> int:
    """Into how many shards the last axis is cut."""
    spec = sharding.spec
    names = spec[-1] if len(spec) == ndim else None
    names = () if names is None else (names,) if isinstance(names, str) else names
    return math.prod(sharding.mesh.shape[name] for name in names)
