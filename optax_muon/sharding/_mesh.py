"""Where the leaves lie: the mesh and each leaf's spec, found from the arrays, else from what the user said."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from optax_muon.parameters import MatrixView
from optax_muon.sharding._units import Axes, short_and_long

Spec = tuple[Axes, ...]


@dataclasses.dataclass(frozen=True)
class Placement:
    """How the leaves lie on a mesh.

    Attributes:
        mesh: the mesh, or None where there is none or all of it is manual (inside `pmap` and a full `shard_map`).
        axes: (name, size) of the mesh axes that are not manual, in mesh order.
        specs: one per leaf: the mesh axes of every dimension, as far as they are known.
        told: one per leaf: whether all of the spec is known (under `jit` an Auto mesh does not tell it).
    """

    mesh: Mesh | AbstractMesh | None
    axes: tuple[tuple[str, int], ...]
    specs: tuple[Spec, ...]
    told: tuple[bool, ...]


def find_placement(
    leaves: Sequence[jax.Array], paths: Sequence[str], param_specs: Sequence[Any] | None = None
) -> Placement:
    """The mesh and the spec of every leaf.

    The mesh is the one of the arrays (their types under a trace, their shardings otherwise); for traced arrays
    that carry none, the one of `param_specs` given as NamedShardings, else the current abstract mesh.

    Raises:
        ValueError: leaves on different meshes, some on a mesh and some committed to a single device, or a spec
            that does not fit its leaf; each names the leaf.
    """
    given = list(param_specs) if param_specs is not None else [None] * len(leaves)
    mesh = _mesh_of(leaves, paths, given)
    free = () if mesh is None else tuple(name for name in mesh.axis_names if name not in _manual(mesh))
    if mesh is None or not free:
        return Placement(None, (), tuple(((),) * leaf.ndim for leaf in leaves), (True,) * len(leaves))
    sizes = {name: mesh.shape[name] for name in free}
    explicit = {
        n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit
    }
    specs, told = [], []
    for leaf, path, said in zip(leaves, paths, given, strict=True):
        spec, whole = _known_spec(leaf, path, said, explicit)
        specs.append(_checked(spec, leaf.shape, path, sizes, _manual(mesh)))
        told.append(whole or explicit.issuperset(free))
    return Placement(mesh, tuple(sizes.items()), tuple(specs), tuple(told))


def platform_of(leaves: Sequence[Any], param_specs: Any = None) -> str | None:
    """The platform that the leaves' mesh or devices belong to ('cpu', 'gpu', 'tpu'), or None if nothing says.

    Under ahead-of-time compilation it differs from `jax.default_backend()`.
    """
    for leaf in leaves:
        if _is_concrete(leaf):
            return next(iter(leaf.sharding.device_set)).platform
        device = jax.typeof(leaf).sharding.mesh.abstract_device
        if device is not None:
            return device.platform
    for said in jax.tree.leaves(param_specs, is_leaf=lambda x: isinstance(x, PartitionSpec)):
        if isinstance(said, NamedSharding) and isinstance(said.mesh, Mesh):
            return said.mesh.devices.flat[0].platform
    return None


def varying_axes(leaf: jax.Array) -> Axes:
    """The manual mesh axes over which the type says that a leaf differs (none under `check_vma=False`)."""
    kind = getattr(jax.typeof(leaf), "manual_axis_type", None)
    return tuple(sorted(kind.varying)) if kind is not None else ()


def check_not_shards(leaves: Sequence[jax.Array], paths: Sequence[str], manual_batch_axes: Axes) -> None:
    """Raises where a leaf inside the user's `shard_map` is a shard, because a shard is not a matrix.

    Raises:
        ValueError: a leaf varies over a manual mesh axis that is not in `manual_batch_axes`.
    """
    for leaf, path in zip(leaves, paths, strict=True):
        wrong = [name for name in varying_axes(leaf) if name not in manual_batch_axes]
        if wrong:
            raise ValueError(
                f"`{path}` varies over the manual mesh axis {wrong[0]!r} inside shard_map: this device sees "
                f"{tuple(leaf.shape)}, and a shard of a matrix has other singular vectors than the matrix. "
                f"If {wrong[0]!r} cuts layers or experts (a batch axis of the leaf), pass "
                f"manual_batch_axes=({wrong[0]!r},). If it cuts data, average the gradients over it first "
                "(jax.lax.pmean). Otherwise update the optimizer outside the shard_map."
            )


def check_axes(names: Sequence[str], argument: str, placement: Placement) -> None:
    """Raises where an argument names a mesh axis that the mesh has not.

    Raises:
        ValueError: names the argument, the axis and the axes there are.
    """
    if placement.mesh is None:
        return  # the same configuration must run on one device
    for name in names:
        if name not in placement.mesh.axis_names:
            raise ValueError(
                f"{argument}={tuple(names)!r} names the mesh axis {name!r}, but the parameters' mesh has the "
                f"axes {placement.mesh.axis_names}. Write some of those."
            )


def guess_spec(
    shape: Sequence[int],
    view: MatrixView,
    axes: Sequence[tuple[str, int]],
    known: Spec,
    sizes: dict[str, int],
) -> Spec:
    """A layout to assume where nobody says how a leaf lies: the last mesh axis cuts the long side, others the short.

    This is how tensor and fsdp axes usually lie; and a leaf that is cut by fewer axes (FSDP alone, tensor parallel
    alone, data parallel) reaches it by slicing, without a message. Where it is wrong, the compiler moves the leaf to
    it with an exchange of its own before ours. An axis that divides no dimension is left out.

    Args:
        shape: the leaf's shape.
        view: its resolved view.
        axes: (name, size) of the mesh axes to place, in mesh order.
        known: the axes whose place is known already.
        sizes: sizes of all mesh axes.

    Returns:
        The assumed spec; correct results do not depend on it.
    """
    short, long = short_and_long(view, shape)
    cut = list(known)
    parts = [math.prod(sizes[name] for name in names) for names in cut]
    for i, (name, size) in enumerate(
        reversed([axis for axis in axes if not any(axis[0] in c for c in known)])
    ):
        for axis in (*long, *short) if i == 0 else (*short, *long):
            if shape[axis] % (parts[axis] * size) == 0:
                cut[axis] += (name,)
                parts[axis] *= size
                break
    return tuple(cut)


def _is_concrete(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)


def _manual(mesh: Mesh | AbstractMesh) -> set[str]:
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name for name, kind in types if kind == AxisType.Manual}


def _mesh_of(
    leaves: Sequence[jax.Array], paths: Sequence[str], given: Sequence[Any]
) -> Mesh | AbstractMesh | None:
    found: Mesh | AbstractMesh | None = None
    owner, alone = "", ""
    for leaf, path in zip(leaves, paths, strict=True):
        if _is_concrete(leaf):
            mesh = leaf.sharding.mesh if isinstance(leaf.sharding, NamedSharding) else None
            if isinstance(leaf.sharding, SingleDeviceSharding) and leaf.committed:
                alone = alone or path
        else:
            mesh = jax.typeof(leaf).sharding.mesh
        if mesh is None or mesh.empty:
            continue
        if found is None:
            found, owner = mesh, path
        elif mesh != found:
            raise ValueError(
                f"`{path}` lies on the mesh {_text(mesh)}, but `{owner}` on {_text(found)}. Put all parameters of "
                "one optimizer on one mesh (jax.device_put with NamedShardings of it; P() replicates a leaf)."
            )
    if found is not None and alone:
        raise ValueError(
            f"`{alone}` lies on a single device, but `{owner}` on the mesh {_text(found)}. Put it there too: "
            f"jax.device_put(x, NamedSharding(mesh, P())) replicates it."
        )
    if found is not None or any(_is_concrete(leaf) for leaf in leaves):
        return found
    for said in given:
        if isinstance(said, NamedSharding):
            return said.mesh
    current = jax.sharding.get_abstract_mesh()
    return None if current.empty else current


def _text(mesh: Mesh | AbstractMesh) -> str:
    return "(" + ", ".join(f"{name}={size}" for name, size in mesh.shape.items()) + ")"


def _known_spec(leaf: Any, path: str, said: Any, explicit: set[str]) -> tuple[Spec, bool]:
    """What is known of a leaf's spec, and whether that is all of it.

    A concrete array tells all. A type tells the Explicit axes; the others are as the user says.
    """
    if _is_concrete(leaf):
        sharding = leaf.sharding
        known = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
        return _normal(known, leaf.ndim, path), True
    typed = _normal(jax.typeof(leaf).sharding.spec, leaf.ndim, path)
    if said is None:
        return typed, False
    told = _normal(said.spec if isinstance(said, NamedSharding) else said, leaf.ndim, path)
    if all(set(fixed) == set(names) & explicit for fixed, names in zip(typed, told, strict=True)):
        return told, True
    # Momentum may be cut further than its parameter; its type is the truth about Explicit axes.
    rest = [tuple(name for name in names if name not in explicit) for names in told]
    return tuple(fixed + more for fixed, more in zip(typed, rest, strict=True)), True


def _normal(spec: Any, ndim: int, path: str) -> Spec:
    """A PartitionSpec as one tuple of names per dimension."""
    if not isinstance(spec, PartitionSpec):
        raise ValueError(
            f"`{path}`: its entry of param_specs is {spec!r}; write a PartitionSpec or a NamedSharding."
        )
    if len(spec) > ndim:
        raise ValueError(
            f"`{path}` has {ndim} axes, but its spec {spec} has {len(spec)} entries. "
            "Give at most one entry per axis of the leaf."
        )
    entries = [*spec, *[None] * (ndim - len(spec))]
    return tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)


def _checked(spec: Spec, shape: tuple[int, ...], path: str, sizes: dict[str, int], manual: set[str]) -> Spec:
    seen: dict[str, int] = {}
    for axis, names in enumerate(spec):
        for name in names:
            if name not in sizes:
                what = "is manual here" if name in manual else f"is none of the mesh's axes {tuple(sizes)}"
                raise ValueError(f"`{path}`: its spec names {name!r} for axis {axis}, which {what}.")
            if name in seen:
                raise ValueError(
                    f"`{path}`: its spec cuts axis {seen[name]} and axis {axis} by the same mesh axis {name!r}. "
                    "A mesh axis can cut one axis of an array; drop it from one of them."
                )
            seen[name] = axis
        parts = math.prod(sizes[name] for name in names)
        if shape[axis] % parts:
            raise ValueError(
                f"`{path}` has shape {tuple(shape)}: axis {axis} has {shape[axis]} entries, which the mesh axes "
                f"{names} of its spec cannot divide into {parts}. Leave that axis whole (None in the spec)."
            )
    return spec
