"""`state_shardings`: where each leaf of an optimizer's state lies, from where its parameter lies."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from optax_muon.parameters import leaf_paths
from optax_muon.sharding import shard_further
from optax_muon.transforms._momentum import is_momentum


def state_shardings(
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    params: Any,
    shard_over: str | Sequence[str] | None = None,
) -> Any:
    """The sharding of every leaf of `optimizer.init(params)`; no array is made.

    A state leaf that belongs to a parameter (it ends in the parameter's path and has its shape: momentum,
    AdamW's moments, accumulated gradients, averages of weights) lies as the parameter does; counters and
    everything else are replicated. Works for any chain or wrapper around any Optax transformation, holes of
    `optax.masked` included.

    Args:
      optimizer: what `init` is called on.
      params: arrays, or `jax.ShapeDtypeStruct`s with a sharding. All on one mesh, or all on one device.
      shard_over: mesh axes over which the parameters' state is cut beyond its parameter (ZeRO-1). Each goes
        to the first axis of a leaf that it divides; a leaf that cannot be cut further lies as its parameter.
        Updates stay exact: `muon` brings gradients to the momentum and updates back to the parameters.

    Returns:
      A pytree of `NamedSharding`s (of the one `SingleDeviceSharding` where there is no mesh) with the
      structure of `optimizer.init(params)`, for `jax.jit(optimizer.init, out_shardings=...)` and, as
      `ShapeDtypeStruct`s, for Orbax. For momentum on the host, map `with_memory_kind("pinned_host")` over it.

    Raises:
      ValueError: a parameter without a sharding, parameters on several meshes, or an axis that the mesh has
      not.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import NamedSharding, PartitionSpec
      >>> import optax_muon
      >>> mesh = jax.make_mesh((1, 1), ("data", "model"))
      >>> by_columns = NamedSharding(mesh, PartitionSpec(None, "model"))
      >>> params = {"dense": {"kernel": jax.device_put(jnp.ones((8, 16)), by_columns)}}
      >>> optimizer = optax_muon.scale_by_muon()
      >>> shardings = optax_muon.state_shardings(optimizer, params, shard_over="data")
      >>> tuple(shardings.mu["dense"]["kernel"].spec), tuple(shardings.count.spec)
      (('data', 'model'), ())
      >>> state = jax.jit(optimizer.init, out_shardings=shardings)(params)
      >>> target = jax.tree.map(       # what Orbax takes to restore onto this mesh
      ...     lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      ...     jax.eval_shape(optimizer.init, params), shardings)

    References:
      ZeRO stage 1: Rajbhandari et al., arXiv 1910.02054; Moonlight, arXiv 2502.16982, section 2.3.
    """
    of_params = dict(zip(leaf_paths(params), jax.tree.leaves(params), strict=True))
    everywhere = _replicated(of_params)
    axes = (shard_over,) if isinstance(shard_over, str) else tuple(shard_over or ())
    if axes:
        _check_axes(axes, everywhere)

    def place(path: str, leaf: Any) -> Any:
        shape = leaf.values.shape if is_momentum(leaf) else leaf.shape
        param = _parameter_of(path, shape, of_params)
        if param is None or not isinstance(param.sharding, NamedSharding):
            return jax.tree.map(lambda _: everywhere, leaf)
        sharding = param.sharding
        if axes:
            # Blocks of int8 momentum must not be cut: the last axis of its scales counts them.
            both = tuple(map(math.gcd, shape, leaf.scales.shape)) if is_momentum(leaf) else shape
            sizes = dict(sharding.mesh.shape)
            sharding = _with_spec(sharding, shard_further(sharding.spec, both, axes, sizes))
        if not is_momentum(leaf):
            return sharding
        return jax.tree.map(lambda x: _with_spec(sharding, _divisible(sharding, x.shape)), leaf)

    state = jax.eval_shape(optimizer.init, params)
    leaves, treedef = jax.tree.flatten(state, is_leaf=is_momentum)
    paths = leaf_paths(state, is_momentum)
    return treedef.unflatten([place(path, leaf) for path, leaf in zip(paths, leaves, strict=True)])


def _parameter_of(path: str, shape: tuple[int, ...], of_params: dict[str, Any]) -> Any:
    """The parameter to which a state leaf belongs, or None: the longest end of its path that names one."""
    components = path.split("/")
    for start in range(len(components) + 1):
        param = of_params.get("/".join(components[start:]))
        if param is not None and jnp.shape(param) == shape:
            return param
    return None


def _divisible(sharding: NamedSharding, shape: tuple[int, ...]) -> PartitionSpec:
    """The spec without what cannot cut the shape: int8 momentum can have fewer scales than shards."""
    parts = zip(shape, [*sharding.spec, *[None] * len(shape)], strict=False)
    return PartitionSpec(*(None if n % _size(sharding, names) else names for n, names in parts))


def _size(sharding: NamedSharding, names: Any) -> int:
    names = () if names is None else (names,) if isinstance(names, str) else names
    return math.prod(sharding.mesh.shape[name] for name in names)


def _with_spec(sharding: NamedSharding, spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def _replicated(of_params: dict[str, Any]) -> Sharding:
    """What lies the same on every device of the parameters' mesh, or on their one device."""
    shardings = {path: getattr(x, "sharding", None) for path, x in of_params.items()}
    first = next(((p, s) for p, s in shardings.items() if isinstance(s, NamedSharding)), None)
    if first is not None:
        named, mesh = first[0], first[1].mesh
        for path, sharding in shardings.items():
            if not isinstance(sharding, NamedSharding):
                raise ValueError(
                    f"`{path}` has no NamedSharding (got {sharding!r}), but `{named}` lies on a mesh. Put it "
                    f"there: jax.device_put(x, NamedSharding(mesh, PartitionSpec())) replicates it; for "
                    f"abstract parameters, jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=...)."
                )
            if sharding.mesh != mesh:
                raise ValueError(
                    f"`{path}` lies on the mesh {sharding.mesh.shape}, but `{named}` on {mesh.shape}. Put "
                    f"all parameters of one optimizer on one mesh."
                )
        return NamedSharding(mesh, PartitionSpec())
    for path, sharding in shardings.items():
        if not isinstance(sharding, SingleDeviceSharding):
            raise ValueError(
                f"`{path}` has no sharding to follow (got {sharding!r}). Pass arrays, or "
                f"jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))."
            )
    return next(iter(shardings.values()), None) or SingleDeviceSharding(jax.devices()[0])


def _check_axes(axes: Sequence[str], everywhere: Sharding) -> None:
    if isinstance(everywhere, NamedSharding):
        for name in axes:
            if name not in everywhere.mesh.shape:
                raise ValueError(
                    f"shard_over={tuple(axes)!r} names the mesh axis {name!r}, but the parameters' mesh has "
                    f"the axes {tuple(everywhere.mesh.shape)}. Write some of those."
                )
