"""Weight decay only where it does not work against the update."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_muon.transforms._checks import check_not_negative


class CautiousDecayState(NamedTuple):
    """State of `add_cautious_decayed_weights` with a schedule.

    Attributes:
      count: int32 scalar, updates done so far.
    """

    count: jax.Array


def _decayed(update: jax.Array, param: jax.Array, decay: Any) -> jax.Array:
    dtype = jnp.promote_types(jnp.float32, update.dtype)
    u, p = update.astype(dtype), param.astype(dtype)
    # Signs, not the product u * p, which underflows to zero for small numbers.
    against = ((u > 0) & (p < 0)) | ((u < 0) & (p > 0))
    return (u + jnp.asarray(decay, dtype) * jnp.where(against, 0, p)).astype(update.dtype)


def add_cautious_decayed_weights(
    weight_decay: float | jax.Array | Callable[[jax.Array], Any], mask: Any = None
) -> optax.GradientTransformationExtraArgs:
    r"""Adds decay to those entries whose weight the update shrinks anyway. Takes the place of
    `optax.add_decayed_weights`.

    Formula, entry by entry, with the update u that will be subtracted (before the learning rate and its sign)
    and weight w:

        u <- u + d w   where u w >= 0,   u elsewhere

    Args:
      weight_decay: d, not negative, a number or a schedule of the step (from 0).
      mask: tree of booleans, prefix or callable, as in `optax.add_decayed_weights`; None decays every leaf.

    Returns:
      A `GradientTransformationExtraArgs`; without a schedule it has no state. Updates keep their shapes,
      dtypes and shardings. `update` needs the params; extra arguments are ignored.

    Raises:
      ValueError, TypeError: a negative decay; at `update`, params that are None.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_muon import add_cautious_decayed_weights
      >>> transformation = add_cautious_decayed_weights(0.5)
      >>> weights = jnp.array([2.0, -2.0, 2.0])
      >>> updates, state = jnp.array([1.0, 1.0, 0.0]), transformation.init(weights)
      >>> updates, state = transformation.update(updates, state, weights)
      >>> updates.tolist()
      [2.0, 1.0, 1.0]

    References:
      Cautious weight decay, arXiv 2510.12402.
    """
    check_not_negative("weight_decay", weight_decay)

    def init(params: optax.Params) -> optax.EmptyState | CautiousDecayState:
        del params
        return CautiousDecayState(jnp.zeros([], jnp.int32)) if callable(weight_decay) else optax.EmptyState()

    def update(updates: optax.Updates, state: Any, params: Any = None, **extra_args: Any):
        del extra_args
        if params is None:
            raise ValueError(
                "add_cautious_decayed_weights compares updates with weights, so it needs them: call "
                "update(updates, state, params)."
            )
        decay = weight_decay
        if callable(weight_decay):
            decay, state = (
                weight_decay(state.count),
                CautiousDecayState(jnp.asarray(optax.safe_increment(state.count))),
            )
        return jax.tree.map(lambda u, p: _decayed(u, p, decay), updates, params), state

    transformation = optax.GradientTransformationExtraArgs(init, update)
    if mask is None:
        return transformation
    return optax.with_extra_args_support(optax.masked(transformation, mask))
