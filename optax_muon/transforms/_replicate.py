"""Small arrays, whole on every device of an Explicit mesh, where types forbid some operations on a shard."""

import jax
from jax.sharding import AxisType, PartitionSpec


def replicate(x: jax.Array) -> jax.Array:
    """The array without its sharding over Explicit mesh axes; itself on any other mesh or none."""
    sharding = jax.typeof(x).sharding
    if sharding.mesh.empty or AxisType.Explicit not in sharding.mesh.axis_types:
        return x
    return jax.sharding.reshard(x, PartitionSpec())
