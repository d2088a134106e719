"""What an optimizer's state knows of each parameter, read from one state and put into another."""

import dataclasses
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, SingleDeviceSharding

from optax_muon.parameters import leaf_paths
from optax_muon.transforms._momentum import Int8Momentum, is_momentum, read_momentum, write_momentum

Initable = optax.GradientTransformation | optax.MultiSteps


@dataclasses.dataclass
class Moments:
    """What a state knows of the gradients, by the path of the parameter.

    Attributes:
      count: updates done, or None if the state does not tell.
      momentum: averages of gradients, as Muon keeps them.
      adam: first and second moments.
    """

    count: int | None
    momentum: dict[str, Any]
    adam: dict[str, tuple[Any, Any]]


def read(name: str, state: Any, params: Any) -> Moments:
    """The moments in a state, whatever is chained or wrapped around them."""
    found = Moments(None, {}, {})
    for node in jax.tree.leaves(state, is_leaf=_holds_moments):
        if not _holds_moments(node):
            continue
        fields = _fields(node)
        found.count = max(found.count or 0, int(fields["count"]))
        mu = _by_param(fields["mu"])
        if "nu" in fields:
            nu = _by_param(fields["nu"])
            found.adam |= {path: (mu[path], nu[path]) for path in mu}
        else:
            found.momentum |= mu
    if found.count is None:
        raise ValueError(
            f"{name}: the state holds no moments (a node with `count` and `mu`). Pass what the optimizer's "
            f"init and update return, not the parameters or the whole training state."
        )
    check_known([*found.momentum, *found.adam], leaf_paths(params), name)
    return found


def fill(name: str, found: Moments, optimizer: Initable, params: Any, carry: bool = True) -> Any:
    """A fresh state of the optimizer, with the moments put in their places and every counter at their step.

    Args:
      name: of the public function, for messages.
      found: what there is.
      optimizer: whose state to fill.
      params: its parameters.
      carry: whether Adam's first moment becomes the momentum of a leaf that has none.
    """
    target = optimizer.init(params)
    fresh: list[str] = []
    missing: list[str] = []
    first, second = ({path: pair[i] for path, pair in found.adam.items()} for i in (0, 1))
    momentum = (first if carry else {}) | found.momentum

    def place(path: str, leaf: Any, values: Mapping[str, Any]) -> Any:
        if path in values:
            return fitted(values[path], leaf, path)
        if path not in found.momentum and path not in found.adam:
            missing.append(path)
        elif values is not momentum:  # a momentum that starts at zero was asked for
            fresh.append(path)
        return leaf

    def refill(tree: Any, values: Mapping[str, Any]) -> Any:
        leaves = [place(path, leaf, values) for path, leaf in flatten(tree)]
        return jax.tree.unflatten(jax.tree.structure(tree, is_leaf=is_momentum), leaves)

    def node(x: Any) -> Any:
        if not _holds_moments(x):
            return x
        if "nu" in _fields(x):
            return x._replace(mu=refill(x.mu, first), nu=refill(x.nu, second))
        return x._replace(mu=refill(x.mu, momentum))

    filled = jax.tree.map(node, target, is_leaf=_holds_moments)
    if missing:
        raise ValueError(
            f"{name}: no moments were found for {listed(dict.fromkeys(missing))}. Each parameter that is "
            f"trained needs them; leave others out with a rule Rule(pattern, 'frozen')."
        )
    warn_fresh(name, list(dict.fromkeys(fresh)))
    return filled if found.count is None else _at_step(filled, found.count)


def _at_step(state: Any, step: int) -> Any:
    """The state with every counter at this step, so that rates and decay follow one clock."""
    flat = flatten(state)
    leaves = [jnp.full_like(leaf, step) if is_counter(path, leaf) else leaf for path, leaf in flat]
    return jax.tree.unflatten(jax.tree.structure(state, is_leaf=is_momentum), leaves)


def is_counter(path: str, leaf: Any) -> bool:
    """Whether a leaf counts updates, by Optax's name for it."""
    return path.split("/")[-1] == "count" and not is_momentum(leaf) and jnp.ndim(leaf) == 0


def _fields(x: Any) -> Mapping[str, Any]:
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return x._asdict()  # pyright: ignore[reportAttributeAccessIssue]
    return x if isinstance(x, dict) else {}


def _holds_moments(x: Any) -> bool:
    """Whether x is the state of scale_by_muon or scale_by_adam, ours, the peer's, or as untyped dicts."""
    fields = _fields(x)
    return "mu" in fields and "count" in fields


def fitted(value: Any, like: Any, path: str) -> Any:
    """A value in the dtype, storage and place of a state's own leaf."""
    stored, wanted = (jnp.shape(x.values if is_momentum(x) else x) for x in (value, like))
    if stored != wanted:
        raise ValueError(
            f"`{path}` has shape {stored} in the given state, but {wanted} in the state of this optimizer "
            f"and these parameters. Give the state of the same model."
        )
    if is_momentum(value) or is_momentum(like):
        if is_momentum(value) and is_momentum(like) and jnp.shape(value.scales) == jnp.shape(like.scales):
            return jax.tree.map(_placed, value, like)
        return jax.tree.map(_placed, write_momentum(jnp.asarray(read_momentum(value)), like), like)
    return _placed(value, like)


def _placed(value: Any, like: Any) -> Any:
    if not isinstance(like, jax.Array):
        return value
    value = value.astype(like.dtype) if isinstance(value, jax.Array) else jnp.asarray(value, like.dtype)
    here, there = value.sharding, like.sharding
    on_one = isinstance(here, SingleDeviceSharding) and isinstance(there, SingleDeviceSharding)
    on_mesh = isinstance(here, NamedSharding) and isinstance(there, NamedSharding) and here.mesh == there.mesh
    return value if on_one or on_mesh else jax.device_put(value, there)


# --- leaves by path


def _stops(x: Any) -> bool:
    return is_momentum(x) or isinstance(x, optax.MaskedNode)


def flatten(tree: Any) -> list[tuple[str, Any]]:
    """(path, leaf), an int8 momentum being one leaf."""
    return list(zip(leaf_paths(tree, is_momentum), jax.tree.leaves(tree, is_leaf=is_momentum), strict=True))


def by_path(state: Any) -> dict[str, Any]:
    """Leaves by path; int8 momentum that came back as a dict is put together again."""
    table = dict(flatten(state))
    for path in [p for p in table if p.endswith("/values") and p[: -len("values")] + "scales" in table]:
        stem = path[: -len("/values")]
        table[stem] = Int8Momentum(table.pop(path), table.pop(stem + "/scales"))
    return table


def _by_param(tree: Any) -> dict[str, Any]:
    pairs = zip(leaf_paths(tree, _stops), jax.tree.leaves(tree, is_leaf=_stops), strict=True)
    return {path: leaf for path, leaf in pairs if not isinstance(leaf, optax.MaskedNode)}


def core(path: str) -> str:
    """The part of a state's path that does not depend on what is chained or wrapped around `muon`."""
    components = path.split("/")
    if "inner_states" not in components:
        return path
    return "/".join(components[len(components) - 1 - components[::-1].index("inner_states") :])


def unique(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The pairs whose first entry occurs once."""
    out: dict[str, str] = {}
    twice = set()
    for key, value in pairs:
        if key in out:
            twice.add(key)
        out[key] = value
    return {key: value for key, value in out.items() if key not in twice}


def check_known(paths: Iterable[str], of_params: Iterable[str], name: str) -> None:
    """Raises where a path of moments belongs to no parameter."""
    known = set(of_params)
    if "" in known:
        return
    ends = lambda path: ("/".join(path.split("/")[i:]) for i in range(path.count("/") + 1))
    strangers = [path for path in paths if not any(end in known for end in ends(path))]
    if strangers:
        raise ValueError(
            f"{name}: {listed(strangers)} belong to no parameter. The parameters are {listed(sorted(known))}."
            f" Give the state of the same model, and paths as describe(params) shows them."
        )


def warn_fresh(name: str, paths: Sequence[str]) -> None:
    if paths:
        warnings.warn(f"{name}: these leaves start fresh, as init makes them: {listed(paths)}.", stacklevel=4)


def listed(paths: Iterable[str], most: int = 8) -> str:
    paths = list(paths)
    more = f" and {len(paths) - most} more" if len(paths) > most else ""
    return ", ".join(f"`{path}`" for path in paths[:most]) + more if paths else "nothing"
