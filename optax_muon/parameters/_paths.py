"""Leaves and their slash paths in any container, with the axis names and module types that it knows."""

import dataclasses
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.core as jax_core
import numpy as np

# What a module may tell about the arrays it owns. Names and attributes only: no framework is imported here.
_FACTS = (
    "num_spatial_dims",
    "groups",
    "in_channels",
    "in_features",
    "out_features",
    "features",
    "axis",
    "batch_axis",
    "batch_dims",
    "kernel_size",
    "feature_group_count",
    "shape",
    "In",
    "Out",
    "Spatial",
)
_FRAMEWORKS = (
    ("equinox.nn", "equinox"),
    ("flax.nnx.nn", "nnx"),
    ("flax.linen", "linen"),
    ("haliax.nn", "haliax"),
)
_BOXES = {"flax": ("AxisMetadata", "Variable", "VariableState"), "haliax": ("NamedArray",)}


@dataclasses.dataclass(frozen=True)
class Owner:
    """The module a leaf belongs to: framework, class names, and the attributes that fix the leaf's axes."""

    framework: str
    classes: tuple[str, ...]
    facts: tuple[tuple[str, Any], ...] = ()

    def fact(self, name: str) -> Any:
        return dict(self.facts).get(name)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf, as far as routing can see it; hashable."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    names: tuple[str | None, ...] | None = None
    owner: Owner | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)


def leaf_paths(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
    """Slash paths of the leaves of a tree, in the order of `jax.tree.leaves`.

    Args:
        tree: any pytree. Flax's boxes and Variables and Haliax's named arrays add nothing to the path.
        is_leaf: as in `jax.tree.flatten`.

    Returns:
        One path per leaf; a leaf that is the whole tree has the path "".

    Example:
        >>> leaf_paths({"layers": [{"kernel": 1.0, "bias": 2.0}]})
        ['layers/0/bias', 'layers/0/kernel']
    """
    return ["/".join(components) for components, _, _ in flatten(tree, is_leaf)]


def by_path(tree: Any, params: Any, what: str, is_value: Callable[[Any], bool]) -> list[Any]:
    """The value for each leaf of `params` from a tree or prefix of values in any container.

    Args:
        tree: values in a pytree that has the paths of `params` or prefixes of them, or a function of `params`
            that returns one. Dict, FrozenDict, State and module match each other; a module full of values is
            data even if it can be called. Entries that no leaf needs are ignored. None stands for "nothing
            said".
        params: the tree that is asked for.
        what: the argument's name, for the message.
        is_value: tells a value from a container.

    Returns:
        One value (or None) per leaf of `params`.

    Raises:
        ValueError: a leaf has no entry. TypeError: an entry is no value.

    Example:
        >>> params = {"a": [1, 2], "b": {"c": 3}}
        >>> by_path({"a": "x", "b": {"c": "y"}}, params, "labels", lambda v: isinstance(v, str))
        ['x', 'x', 'y']
    """
    return [value for value, _ in entries_by_path(tree, params, what, is_value)]


def entries_by_path(
    tree: Any, params: Any, what: str, is_value: Callable[[Any], bool]
) -> list[tuple[Any, bool]]:
    """As `by_path`, with whether the entry stands exactly at the leaf (True) or above it (False)."""
    if callable(tree) and not any(is_value(x) for x in jax.tree.leaves(tree, is_leaf=is_value)):
        tree = tree(params)
    table: dict[tuple[str, ...], Any] = {}
    for components, value, _ in flatten(tree, lambda x: x is None or is_value(x)):
        if value is not None and not is_value(value):
            where = f" at `{'/'.join(components)}`" if components else ""
            raise TypeError(f"{what}: got {value!r}{where}; it holds only values for {what}, and None.")
        table[components] = value
    holes = {components for components, value, _ in flatten(tree, _is_hole) if _is_hole(value)}
    found = []
    for components, _, _ in flatten(params):
        for length in range(len(components), -1, -1):
            if components[:length] in table:
                found.append((table[components[:length]], length == len(components)))
                break
            if components[:length] in holes:
                found.append((None, False))
                break
        else:
            raise ValueError(
                f"{what} has no entry for `{'/'.join(components)}`. Give one at that path or above it "
                "(None leaves the choice to the rules)."
            )
    return found


def flatten(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> list[tuple[tuple[str, ...], Any, Any]]:
    """(path components, leaf, its box or None) in leaf order."""

    def stop(x: Any) -> bool:
        return _is_box(x) or (is_leaf is not None and is_leaf(x))

    out = []
    for keys, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=stop)[0]:
        components = tuple(c for key in keys for c in _key_name(key).split("/") if c)
        if _is_box(node) and not (is_leaf is not None and is_leaf(node)):
            inner = jax.tree.leaves(node, is_leaf=is_leaf)
            out += [((*components, *_part(i, inner)), leaf, node) for i, leaf in enumerate(inner)]
        else:
            out.append((components, node, None))
    return out


def has_holes(tree: Any) -> bool:
    """Whether an outer wrapper has masked part of the tree (optax.MaskedNode, known by its name)."""
    return any(_is_hole(x) for x in jax.tree.leaves(tree, is_leaf=_is_hole))


def leaves_of(params: Any) -> tuple[Leaf, ...]:
    """Every leaf as a hashable record.

    Raises:
        TypeError: a leaf is no array and no number; names its path and type.
        ValueError: two leaves have one path.
    """
    flat = jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_box)[0]
    out: dict[str, Leaf] = {}
    for keys, node in flat:
        components = [c for key in keys for c in _key_name(key).split("/") if c]
        box = node if _is_box(node) else None
        inner = jax.tree.leaves(node)
        for i, leaf in enumerate(inner):
            path = "/".join((*components, *_part(i, inner)))
            shape, dtype = _shape_and_dtype(leaf, path)
            if path in out:
                raise ValueError(
                    f"`{path}` is the path of two leaves, of shapes {out[path].shape} and {shape}: a name with "
                    f"slashes reads as a nested one. Rename one of them."
                )
            owner = owner_of(_parent(params, keys)) if keys else None
            out[path] = Leaf(path, shape, dtype, _axis_names(box, len(shape)), owner)
    return tuple(out.values())


def shared_leaves(params: Any) -> list[tuple[int, int]]:
    """Pairs of positions at which the very same array stands."""
    first: dict[int, int] = {}
    pairs = []
    for position, (_, leaf, _) in enumerate(flatten(params)):
        if isinstance(leaf, jax_core.Tracer) or not isinstance(leaf, (jax.Array, np.ndarray)):
            continue
        if id(leaf) in first:
            pairs.append((first[id(leaf)], position))
        first.setdefault(id(leaf), position)
    return pairs


_SAID: set[str] = set()


def warn_once(message: str) -> None:
    """Warns the first time a message comes up; labels are computed again at every trace."""
    if message not in _SAID:
        warnings.warn(message, UserWarning, stacklevel=3)
        _SAID.add(message)


def owner_of(module: Any) -> Owner | None:
    """The record of a framework's own module that owns a leaf, by the names of its classes."""
    for prefix, framework in _FRAMEWORKS:
        classes = tuple(cls.__name__ for cls in type(module).__mro__ if cls.__module__.startswith(prefix))
        if classes:
            facts = ((name, _hashable(getattr(module, name, None))) for name in _FACTS)
            return Owner(framework, classes, tuple((k, v) for k, v in facts if v is not None))
    return None


def _hashable(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_hashable(v) for v in value)
    if type(value).__name__ == "Axis":  # Haliax: a name and a size
        return value.name
    return value if isinstance(value, (int, str)) else None


def _key_name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _parent(tree: Any, keys: Iterable[Any]) -> Any:
    """The innermost object with attributes on the way to a leaf, or None."""
    node = tree
    for key in tuple(keys)[:-1]:
        try:
            node = getattr(node, key.name) if hasattr(key, "name") else node[_index(key)]
        except (AttributeError, KeyError, IndexError, TypeError):
            return None
    return node


def _index(key: Any) -> Any:
    return key.key if hasattr(key, "key") else key.idx


def _is_box(x: Any) -> bool:
    """A Flax box (Partitioned and the like), NNX Variable or Haliax array, known by the names of its classes."""
    return any(cls.__name__ in _BOXES.get(cls.__module__.split(".")[0], ()) for cls in type(x).__mro__)


def _part(position: int, inner: list[Any]) -> tuple[str, ...]:
    """What a leaf within a box adds to the path: nothing, unless the box holds several."""
    return (str(position),) if len(inner) > 1 else ()


def _is_hole(x: Any) -> bool:
    return type(x).__name__ == "MaskedNode"


def _axis_names(box: Any, ndim: int) -> tuple[str | None, ...] | None:
    if box is None:
        return None
    names = getattr(box, "names", None)
    if names is None and isinstance(getattr(box, "axes", None), tuple):
        names = _hashable(box.axes)
    if names is None and hasattr(box, "get_metadata"):
        metadata = box.get_metadata()
        names = next(
            (metadata[k] for k in ("out_sharding", "sharding_names", "sharding") if metadata.get(k)), None
        )
    if not isinstance(names, tuple):
        return None
    names = tuple(name if isinstance(name, str) else None for name in names)
    # A transformation that stacks without naming its axis leaves too few names: what is missing is unknown.
    return names if len(names) == ndim else None


def _shape_and_dtype(leaf: Any, path: str) -> tuple[tuple[int, ...], str]:
    if isinstance(leaf, (bool, int, float, complex)):
        return (), {bool: "bool", int: "int32", float: "float32"}.get(type(leaf), "complex64")
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise TypeError(
            f"`{path}` is a {type(leaf).__name__}, not an array. Pass only the arrays, for example "
            "eqx.filter(model, eqx.is_inexact_array) or nnx.state(model, nnx.Param)."
        )
    dtype = "float0" if leaf.dtype == jax.dtypes.float0 else str(leaf.dtype)
    return tuple(leaf.shape), dtype
