"""Measurements of updates as they are kept in an optimizer's state, and how they are read."""

from typing import Any, NamedTuple

import jax
import numpy as np

from optax_muon.parameters import leaf_paths


class Measurements(NamedTuple):
    """The last values, each f32[leaves] in the order of `jax.tree.leaves(params)`; NaN without a matrix.

    Attributes:
      update_rms: of the update as applied: rate, factor and decay included.
      update_spectral_norm: the largest over the leaf's matrices.
      weight_rms: before the update.
      weight_spectral_norm: before the update; the largest over the leaf's matrices.
      polar_error: of the update; root mean square over the leaf's matrices.
      cosine: of the step downhill (minus the update) and the gradient.
    """

    update_rms: Any
    update_spectral_norm: Any
    weight_rms: Any
    weight_spectral_norm: Any
    polar_error: Any
    cosine: Any


class RecordState(NamedTuple):
    """State of `record`.

    Attributes:
      count: int32 scalar, updates done so far.
      values: the `Measurements` of the last recorded update.
      inner_state: of the optimizer within.
    """

    count: Any
    values: Measurements
    inner_state: Any


def latest(state: Any, params: Any) -> dict[str, dict[str, float]]:
    """The last measurements of an optimizer with `record` in it, as Python numbers, for a logger.

    Args:
      state: the optimizer's state; `record` may stand anywhere in it.
      params: the parameters, for their paths.

    Returns:
      {measurement: {path: value}}; a path is absent where the measurement does not apply, as the polar error
      of a vector. NaN before the first update.

    Raises:
      ValueError: the state has no `RecordState`, or was made for other parameters.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_muon
      >>> params = {"dense": {"kernel": jnp.eye(4, 16), "bias": jnp.zeros(16)}}
      >>> optimizer = optax_muon.diagnostics.record(optax_muon.muon(1.0, weight_decay=0.0))
      >>> _, state = optimizer.update(params, optimizer.init(params), params)
      >>> list(optax_muon.diagnostics.latest(state, params)["polar_error"])
      ['dense/kernel']
    """
    values = find_record("latest", state).values
    columns = {name: np.asarray(x) for name, x in zip(Measurements._fields, values, strict=True)}
    paths, sizes = leaf_paths(params), columns["update_rms"]
    if len(sizes) != len(paths):
        raise ValueError(f"The state measures {len(sizes)} parameters, but params has {len(paths)} leaves.")
    applies = {name: ~np.isnan(x) | np.isnan(sizes) for name, x in columns.items()}
    return {
        name: {path: float(x[i]) for i, path in enumerate(paths) if applies[name][i]}
        for name, x in columns.items()
    }


def find_record(caller: str, state: Any) -> RecordState:
    """The first `RecordState` in a state."""
    is_record = lambda x: isinstance(x, RecordState)
    found = [x for x in jax.tree.leaves(state, is_leaf=is_record) if is_record(x)]
    if not found:
        raise ValueError(
            f"{caller}: the state holds no measurements. Wrap the optimizer: "
            "optax_muon.diagnostics.record(optax_muon.muon(...))."
        )
    return found[0]
