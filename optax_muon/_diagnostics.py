"""What each update does to the weights, recorded in the state of the optimizer; and figures of it.

Public as `optax_muon.diagnostics`, together with the functions of `_measures`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array

from optax_muon._measures import cosine, polar_error, singular_values, spectral_norm, update_rms
from optax_muon._muon import Muon
from optax_muon._recorded import Measurements, RecordState, latest
from optax_muon.parameters import MatrixView, Rule, decide, leaf_paths
from optax_muon.transforms import ScaleByMuonState
from optax_muon.transforms._momentum import is_momentum, on_mesh_of

__all__ = [
    "Measurements",
    "RecordState",
    "cosine",
    "latest",
    "plot_history",
    "plot_spectra",
    "polar_error",
    "record",
    "singular_values",
    "spectral_norm",
    "update_rms",
]


class _Recorder(optax.GradientTransformationExtraArgs):
    """What `record` returns: it knows the `config` of the `muon` within, for `describe`; None around a chain."""

    config: Any

    def __new__(cls, init: Callable, update: Callable, config: Any):
        self = super().__new__(cls, init, update)
        self.config = config
        return self


def record(
    inner: optax.GradientTransformation, *, every: int = 1, rules: Sequence[Rule] | None = None
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that keeps measurements of its last update in its state.

    Updates are those of `inner`.

    Args:
      inner: `muon`, or a chain with it.
      every: measure at steps 0, every, 2 every, ... and keep the values in between.
      rules: the rules given to `muon`, where `inner` is a chain and does not tell them itself.

    Returns:
      A `GradientTransformationExtraArgs` with state `RecordState(count, values, inner_state)`; read it with
      `latest`, or `describe(params, optimizer, state=state)`.

    Raises:
      ValueError: `every` below 1; at `update` without parameters.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_muon
      >>> optimizer = optax_muon.diagnostics.record(optax_muon.muon(1.0, weight_decay=0.0))
      >>> params = {"dense": {"kernel": jnp.eye(4, 16)}}
      >>> updates, state = optimizer.update(params, optimizer.init(params), params)
      >>> measured = optax_muon.diagnostics.latest(state, params)
      >>> bool(0.6 < measured["update_spectral_norm"]["dense/kernel"] / (0.2 * 16**0.5) < 1.2)
      True

    Note:
      Costs about 130 matrix-vector products for each matrix, 1 % of an orthogonalisation at side 1024;
      `every` divides it.
    """
    if every < 1:
        raise ValueError(f"record: every must be at least 1, got {every!r}.")
    config = inner.config if isinstance(inner, Muon) else None
    if config is not None and rules is None:
        rules = config.rules
    views: dict[tuple, dict[str, MatrixView | None]] = {}
    optimizer: Any = optax.with_extra_args_support(inner)

    def views_of(tree: Any) -> dict[str, MatrixView | None]:
        # What init saw stands: the parameters of an update may lack boxes and axis names (nnx.Optimizer).
        key = tuple(zip(leaf_paths(tree), map(jnp.shape, jax.tree.leaves(tree)), strict=True))
        if key not in views:
            decisions = decide(tree, rules, config.param_labels if config else None)
            views[key] = {d.path: d.view for d in decisions}
        return views[key]

    def init(params: Any) -> RecordState:
        views_of(params)
        blank = _beside(jnp.full(len(jax.tree.leaves(params)), jnp.nan, jnp.float32), params)
        fields = Measurements(
            *[jnp.copy(blank) for _ in Measurements._fields]
        )  # donation needs buffers apart
        count = on_mesh_of(jnp.zeros([], jnp.int32), params)
        return RecordState(count, fields, optimizer.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        if params is None:
            raise ValueError("record measures the weights too: call update(gradients, state, params).")
        result, inner_state = optimizer.update(updates, state.inner_state, params, **extra_args)
        table = views_of(params)
        on_muon = _muon_paths(inner_state)
        chosen = [table[path] if path in on_muon else None for path in leaf_paths(params)]

        def measure(_: Measurements) -> Measurements:
            trees = [jax.tree.leaves(tree) for tree in (updates, result, params)]
            rows = [_row(g, u, w, view) for g, u, w, view in zip(*trees, chosen, strict=True)]
            if not rows:
                return state.values
            columns = [jnp.stack(column) for column in zip(*rows, strict=True)]
            return Measurements(*[_beside(column, params) for column in columns])

        due = state.count % every == 0
        values = (
            measure(state.values) if every == 1 else lax.cond(due, measure, lambda old: old, state.values)
        )
        return result, RecordState(optax.safe_increment(state.count), values, inner_state)

    return _Recorder(init, update, config)


def _row(gradient: Array, update: Array, weight: Array, view: MatrixView | None) -> tuple[Array, ...]:
    """The measurements of one leaf, in the order of the fields of `Measurements`."""
    if not update.size or not jnp.issubdtype(update.dtype, jnp.floating):
        return (jnp.float32(jnp.nan),) * len(Measurements._fields)
    of_update = of_weight = error = jnp.float32(jnp.nan)
    if view is not None:
        of_update, of_weight = (jnp.max(spectral_norm(x, view)) for x in (update, weight))
        error = jnp.sqrt(jnp.mean(polar_error(update, view) ** 2))
    row = (update_rms(update), of_update, update_rms(weight), of_weight, error, -cosine(update, gradient))
    return tuple(x.astype(jnp.float32) for x in row)


def _muon_paths(state: Any) -> set[str]:
    """The leaves that have momentum: those that Muon trains."""
    stops = lambda x: is_momentum(x) or isinstance(x, optax.MaskedNode)
    found = set()
    for node in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, ScaleByMuonState)):
        if isinstance(node, ScaleByMuonState):
            pairs = zip(leaf_paths(node.mu, stops), jax.tree.leaves(node.mu, is_leaf=stops), strict=True)
            found |= {path for path, leaf in pairs if not isinstance(leaf, optax.MaskedNode)}
    return found


def _beside(x: Array, params: Any) -> Array:
    """X replicated on the mesh of the parameters, if any, so that its type is the same at every step."""
    tracer = next((p for p in jax.tree.leaves(params) if isinstance(p, Tracer)), None)
    if tracer is None:
        return on_mesh_of(x, params)
    mesh = jax.typeof(tracer).sharding.mesh
    explicit = not mesh.empty and set(mesh.axis_types) == {AxisType.Explicit}
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec())) if explicit else x


# --- figures


def plot_spectra(matrices: Mapping[str, ArrayLike], view: MatrixView | None = None, ax: Any = None) -> Any:
    """Singular values in descending order, a line for each matrix: what orthogonalisation does to them.

    Each spectrum is divided by its root mean square, so that gradient, momentum and update share one axis.

    Args:
      matrices: {label: array}, for example the gradient and the update of one leaf. Of a stack the first
        matrix is drawn.
      view: which axes form matrices, the same for all.
      ax: matplotlib axes; None makes a figure.

    Returns:
      The axes.

    Raises:
      ImportError: matplotlib is not installed, and no axes were given.
      TypeError, ValueError: as `singular_values`.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_muon
      >>> gradient = jnp.diag(jnp.array([4.0, 2.0, 1.0]))
      >>> orthogonal = optax_muon.orthogonalize(gradient)
      >>> ax = optax_muon.diagnostics.plot_spectra({"gradient": gradient, "update": orthogonal})
      >>> [line.get_label() for line in ax.lines]
      ['gradient', 'update']
    """
    ax = ax or _new_axes()
    for label, x in matrices.items():
        values = np.asarray(singular_values(x, view), np.float64).reshape(-1, _sides(x, view))[0]
        scale = np.sqrt(np.mean(values**2)) or 1.0
        ax.plot(np.arange(1, len(values) + 1), values / scale, marker=".", markersize=3, label=label)
    ax.set_yscale("log")
    ax.set_xlabel("index")
    ax.set_ylabel("singular value / RMS of all")
    ax.legend()
    return ax


def plot_history(
    history: Sequence[Mapping[str, Mapping[str, float]]],
    measurement: str = "update_rms",
    every: int = 1,
    ax: Any = None,
) -> Any:
    """One measurement by leaf over time.

    Args:
      history: what `latest` returned, time after time.
      measurement: a field of `Measurements`.
      every: steps from one entry of the history to the next.
      ax: matplotlib axes; None makes a figure.

    Returns:
      The axes.

    Raises:
      ImportError: matplotlib is not installed, and no axes were given.
      ValueError: the measurement is unknown.

    Example:
      >>> import optax_muon
      >>> history = [{"update_rms": {"up/kernel": 2e-3}}, {"update_rms": {"up/kernel": 1e-3}}]
      >>> ax = optax_muon.diagnostics.plot_history(history, every=10)
      >>> [int(step) for step in ax.lines[0].get_xdata()]
      [0, 10]
    """
    if measurement not in Measurements._fields:
        raise ValueError(f"measurement must be one of {Measurements._fields}, got {measurement!r}.")
    ax = ax or _new_axes()
    paths = list(history[0][measurement]) if history else []
    steps = every * np.arange(len(history))
    for path in paths:
        values = [entry[measurement].get(path, np.nan) for entry in history]
        ax.plot(steps, values, label=path, linewidth=1.2)
    ax.set_xlabel("step")
    ax.set_ylabel(measurement.replace("_", " "))
    if paths:
        ax.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return ax


def _sides(x: ArrayLike, view: MatrixView | None) -> int:
    if view is None:
        return min(jnp.shape(x)[-2:])
    (first, *_) = view.matrix_shapes(jnp.shape(x))
    return min(first.fan_in, first.fan_out)


def _new_axes() -> Any:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install matplotlib.") from error
    return pyplot.subplots(figsize=(6, 4), layout="constrained")[1]
