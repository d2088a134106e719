"""Bytes that training with an optimizer needs on each device, from shapes and shardings alone."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from optax_muon._live_bytes import temporary_bytes
from optax_muon._state_shardings import state_shardings
from optax_muon.parameters import leaf_paths


@dataclasses.dataclass(frozen=True)
class MemoryRow:
    """One line of the table.

    Attributes:
        name: what needs the memory.
        bytes: on each device, with the optimizer that was given.
        adamw_bytes: on each device, with `optax.adamw` on the same parameters.
    """

    name: str
    bytes: int
    adamw_bytes: int

    @property
    def change(self) -> float:
        """By how much it differs from AdamW: -0.45 is 45 % less; inf where AdamW needs nothing."""
        if self.adamw_bytes == 0:
            return math.inf if self.bytes else 0.0
        return self.bytes / self.adamw_bytes - 1


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """What `estimate_memory` returns: `str()` is a table, `rows` is the data, and each row has a property.

    Attributes:
        rows: parameters, gradients, optimizer state, temporaries, total.
        devices: number of devices of the mesh.
        mesh: the axes of the mesh, for the table.
    """

    rows: tuple[MemoryRow, ...]
    devices: int
    mesh: str

    def __getitem__(self, name: str) -> MemoryRow:
        return next(row for row in self.rows if row.name == name)

    @property
    def parameters(self) -> MemoryRow:
        """The row of that name."""
        return self["parameters"]

    @property
    def gradients(self) -> MemoryRow:
        """The row of that name."""
        return self["gradients"]

    @property
    def optimizer_state(self) -> MemoryRow:
        """The row of that name."""
        return self["optimizer state"]

    @property
    def temporaries(self) -> MemoryRow:
        """The row of that name."""
        return self["temporaries"]

    @property
    def total(self) -> MemoryRow:
        """The row of that name."""
        return self["total"]

    def __str__(self) -> str:
        where = f"on each of {self.devices} devices, {self.mesh}" if self.devices > 1 else "on one device"
        lines = [f"{where:28} {'bytes':>20} {'':>12} {'AdamW':>12} {'change':>8}"]
        for row in self.rows:
            ours, theirs = _readable(row.bytes), _readable(row.adamw_bytes)
            change = f"{row.change:+8.1%}" if math.isfinite(row.change) else ""
            lines.append(f"{row.name:28} {row.bytes:20,} {ours:>12} {theirs:>12} {change}".rstrip())
        return "\n".join(lines)


def estimate_memory(
    optimizer: optax.GradientTransformation,
    params: Any,
    mesh: Mesh | AbstractMesh | None = None,
    *,
    shard_over: str | Sequence[str] | None = None,
) -> MemoryEstimate:
    """Bytes per device that parameters, gradients, optimizer state and one update need, beside AdamW.

    Nothing is allocated and nothing is compiled. Parameters, gradients (dtype and sharding of the parameters) and
    optimizer state are exact. The temporaries are those of an update whose gradients and state are donated: its
    program is traced, and a model of the compiler says what is in memory at a time. Forward and backward pass are
    not included.

    Args:
      optimizer: any Optax transformation, wrapped or chained as in training.
      params: tree of arrays or `jax.ShapeDtypeStruct`s. Their NamedShardings count, also on an abstract mesh.
      mesh: a mesh, concrete or abstract, that takes the place of the one in the shardings (their specs stay);
        parameters without a sharding are replicated on it. None for the parameters' own.
      shard_over: mesh axes over which the state is cut beyond its parameter (ZeRO-1), as in `state_shardings`.

    Returns:
      A `MemoryEstimate`.

    Raises:
      ValueError: parameters on several meshes, or a spec that names an axis which the mesh has not.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
      >>> from optax_muon import estimate_memory, muon
      >>> mesh = AbstractMesh((8,), ("data",))
      >>> rows = NamedSharding(mesh, PartitionSpec("data"))
      >>> params = {"dense": {"kernel": jax.ShapeDtypeStruct((4096, 4096), jnp.float32, sharding=rows)}}
      >>> estimate = estimate_memory(muon(1e-3), params)
      >>> estimate.parameters.bytes, estimate.devices
      (8388608, 8)
      >>> print(f"{estimate.optimizer_state.change:.0%}")
      -50%

    Note:
      The model of the temporaries follows XLA on CPU: within 1 % of its `memory_analysis` for the hidden matrices of
      GPT-2 small, a 1B Llama, 64 experts, 168 small matrices and LoRA factors; over all trees, meshes and dtypes that
      were tried, the total was within 16 %. TPUs pad the last two axes of an array to tiles (8 x 128 in float32),
      which is not counted.
    """
    placed = _placed(params, mesh)
    devices, text = _devices(placed)
    weights = _bytes(placed)
    ours = _state(optimizer, placed, shard_over), _temporaries(optimizer, placed)
    with jax.numpy_dtype_promotion("standard"):  # optax.adamw mixes dtypes
        adamw, trained = optax.adamw(1e-3), _trainable(placed)
        theirs = _state(adamw, trained, shard_over), _temporaries(adamw, trained)
    rows = [("parameters", weights, weights), ("gradients", weights, weights)]
    rows += [("optimizer state", _bytes(ours[0]), _bytes(theirs[0])), ("temporaries", ours[1], theirs[1])]
    rows.append(("total", sum(row[1] for row in rows), sum(row[2] for row in rows)))
    return MemoryEstimate(tuple(MemoryRow(*row) for row in rows), devices, text)


def _placed(params: Any, mesh: Mesh | AbstractMesh | None) -> Any:
    """The parameters as shapes on one Explicit mesh: there, types tell where everything lies."""
    found = _explicit(mesh)
    paths = leaf_paths(params)
    leaves, treedef = jax.tree.flatten(params)
    shardings = [
        x.sharding if isinstance(getattr(x, "sharding", None), NamedSharding) else None for x in leaves
    ]
    if found is None:
        found = next((_explicit(s.mesh) for s in shardings if s is not None), None)
    out = []
    for path, x, sharding in zip(paths, leaves, shardings, strict=True):
        if found is None:
            out.append(jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)))
            continue
        spec = PartitionSpec() if sharding is None else sharding.spec
        if mesh is None and sharding is not None and sharding.mesh.shape != found.shape:
            raise ValueError(
                f"`{path}` lies on the mesh {dict(sharding.mesh.shape)}, others on {dict(found.shape)}. Put all "
                f"parameters of one optimizer on one mesh, or name it with mesh=."
            )
        missing = [name for name in _names(spec) if name not in found.shape]
        if missing:
            raise ValueError(
                f"`{path}` is cut over {missing[0]!r} by its spec {spec}, but mesh= has the axes "
                f"{tuple(found.shape)}. Give a mesh with that axis, or other shardings."
            )
        out.append(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(found, spec)))
    return treedef.unflatten(out)


def _explicit(mesh: Mesh | AbstractMesh | None) -> AbstractMesh | None:
    if mesh is None or mesh.empty:
        return None
    abstract = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
    return abstract.update(axis_types=(AxisType.Explicit,) * len(abstract.axis_names))


def _names(spec: PartitionSpec) -> list[str]:
    return [n for e in spec if e is not None for n in ((e,) if isinstance(e, str) else e)]


def _devices(placed: Any) -> tuple[int, str]:
    for x in jax.tree.leaves(placed):
        if x.sharding is not None:
            return x.sharding.mesh.size, ", ".join(f"{name}={n}" for name, n in x.sharding.mesh.shape.items())
    return 1, ""


def _trainable(placed: Any) -> Any:
    """What AdamW trains: it has no use for integers."""
    return [x for x in jax.tree.leaves(placed) if jnp.issubdtype(x.dtype, jnp.inexact)]


def _state(optimizer: Any, placed: Any, shard_over: Any = None) -> Any:
    """The optimizer's state as shapes with shardings."""
    state = jax.eval_shape(optimizer.init, placed)
    if not _devices(placed)[1]:
        return state
    shardings = state_shardings(optimizer, placed, shard_over)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)


def _temporaries(optimizer: Any, placed: Any) -> int:
    state = _state(optimizer, placed)
    program = jax.make_jaxpr(optimizer.update)(placed, state, placed)
    return temporary_bytes(program, donated=len(jax.tree.leaves((placed, state))))


def _bytes(tree: Any) -> int:
    """Bytes on one device."""
    total = 0
    for x in jax.tree.leaves(tree):
        shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
        total += math.prod(shape) * x.dtype.itemsize
    return total


def _readable(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
