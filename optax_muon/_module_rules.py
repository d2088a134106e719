"""Rules from a live model: which class of the framework owns each parameter. Frameworks load when called."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax

from optax_muon.parameters import ADAMW, FROZEN, MUON, Decision, Rule, decide_leaves
from optax_muon.parameters._paths import Leaf, leaves_of, owner_of


def rules_from_nnx(model: Any) -> tuple[Rule, ...]:
    """Rules for the parameters of an NNX model, from the class of the module that owns each.

    Args:
        model: an `nnx.Module`; it may be abstract (`nnx.eval_shape`).

    Returns:
        One rule per parameter that a class of NNX's own owns, for `nnx.state(model, nnx.Param)`, with the
        class in its reason. Parameters of your own classes are left to the tables. Only the class tells a
        grouped convolution, or which axes a `LinearGeneral` without a telling name sums over.

    Raises:
        ImportError: Flax is not installed.

    Example:
        >>> from flax import nnx
        >>> model = nnx.eval_shape(lambda: nnx.LinearGeneral((2, 8), 16, axis=(-2, -1), rngs=nnx.Rngs(0)))
        >>> [(rule.pattern, str(rule.assignment)) for rule in rules_from_nnx(model)]
        [('bias', 'None'), ('kernel', 'MatrixView(reduction_axes=(0, 1), output_axes=(2,))')]
    """
    from flax import nnx

    leaves = leaves_of(nnx.state(model, nnx.Param))
    owned = [dataclasses.replace(leaf, owner=owner_of(_walk(model, leaf.path))) for leaf in leaves]
    return _rules(owned)


def rules_from_equinox(model: Any) -> tuple[Rule, ...]:
    """Rules for the parameters of an Equinox model, from the class of the module that owns each.

    `muon` sees the classes by itself when the parameters are an Equinox tree; these rules serve where the
    parameters travel in another container.

    Args:
        model: an `equinox.Module`.

    Returns:
        One rule per floating array that a class of Equinox's own owns.

    Raises:
        ImportError: Equinox is not installed.

    Example:
        >>> import equinox as eqx
        >>> model = eqx.nn.Linear(4, 8, key=jax.random.key(0))
        >>> [(rule.pattern, str(rule.assignment)) for rule in rules_from_equinox(model)]
        [('weight', 'MatrixView(reduction_axes=(1,), output_axes=(0,))'), ('bias', 'None')]
    """
    import equinox as eqx

    # Abstract leaves too: a model made under jax.eval_shape holds ShapeDtypeStructs.
    arrays = eqx.filter(model, lambda x: eqx.is_inexact_array(x) or isinstance(x, jax.ShapeDtypeStruct))
    return _rules(leaves_of(arrays))


def rules_from_linen(module: Any, *inputs: Any, **kwargs: Any) -> tuple[Rule, ...]:
    """Rules for the parameters of a Linen module, from the class of the submodule that owns each.

    Args:
        module: a `flax.linen.Module`.
        *inputs: what its `__call__` takes, as arrays or `ShapeDtypeStruct`s; it runs abstractly, in `init`.
        **kwargs: keyword arguments of its `__call__`.

    Returns:
        One rule per parameter that a class of Linen's own owns, for `variables["params"]`.

    Raises:
        ImportError: Flax is not installed. Otherwise whatever the module raises.

    Example:
        >>> import flax.linen as nn
        >>> import jax.numpy as jnp
        >>> layer = nn.DenseGeneral((4, 2), name="anything")
        >>> [(rule.pattern, str(rule.assignment)) for rule in rules_from_linen(layer, jnp.zeros((3, 8)))]
        [('bias', 'None'), ('kernel', 'MatrixView(reduction_axes=(0,), output_axes=(1, 2))')]
    """
    import flax.linen as nn

    owners: dict[str, Any] = {}

    def record(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        owners["/".join(context.module.path)] = owner_of(context.module)
        return call(*args, **kwargs)

    with nn.intercept_methods(record):
        # The functions are closed over: static arguments may be no arrays.
        key = jax.random.key(0)
        arrays = [x for x in jax.tree.leaves((inputs, kwargs)) if _is_array(x)]
        rest = jax.tree.map(lambda x: None if _is_array(x) else x, (inputs, kwargs))

        def init(key: Any, arrays: Any) -> Any:
            following = iter(arrays)
            merge = lambda kept, x: next(following) if _is_array(x) else kept
            got, named = jax.tree.map(merge, rest, (inputs, kwargs), is_leaf=lambda x: x is None)
            return module.init(key, *got, **named)

        variables = jax.eval_shape(init, key, arrays)
    leaves = leaves_of(variables.get("params", {}))
    owned = [dataclasses.replace(leaf, owner=owners.get(leaf.path.rpartition("/")[0])) for leaf in leaves]
    return _rules(owned)


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _walk(model: Any, path: str) -> Any:
    """The module that holds a parameter, by attributes, keys and indices."""
    node = model
    for component in path.split("/")[:-1]:
        if hasattr(node, component):
            node = getattr(node, component)
            continue
        try:
            node = node[int(component) if component.isdigit() else component]
        except (KeyError, IndexError, TypeError):
            return None
    return node


def _rules(leaves: Sequence[Leaf]) -> tuple[Rule, ...]:
    decided = decide_leaves(tuple(leaves))
    return tuple(
        _rule(decision)
        for leaf, decision in zip(leaves, decided, strict=True)
        if leaf.owner is not None and decision
    )


def _rule(decision: Decision) -> Rule:
    assignment = {MUON: decision.view, ADAMW: None, FROZEN: FROZEN}.get(decision.label)
    return Rule(re.escape(decision.path), assignment, f"{decision.rule}: {decision.because}")
