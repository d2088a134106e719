"""NorMuon: one second moment per neuron, after the orthogonalisation."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_muon.parameters import MatrixView, Rule
from optax_muon.sharding import zeros_like_param
from optax_muon.transforms._checks import check_choice, check_not_negative, check_unit_interval
from optax_muon.transforms._per_matrix import matrix_axes, mean_per_matrix, rows_and_columns
from optax_muon.transforms._views import ViewsOf, views_from_rules


class ScaleByNormuonState(NamedTuple):
    """State of `scale_by_normuon`.

    Attributes:
      nu: the running mean squares, at least float32, of the parameters' structure; each leaf has its
        parameter's shape with side 1 where the mean was taken.
    """

    nu: Any


def _mean_axes(over: str, view: MatrixView, shape: tuple[int, ...], path: str) -> tuple[int, ...]:
    """The axes of a leaf over which squares are averaged."""
    rows, columns = rows_and_columns(view)
    if over == "fan_in":
        return rows
    choices = {s.fan_in <= s.fan_out for s in view.matrix_shapes(shape)}
    if len(choices) > 1:
        raise ValueError(
            f"`{path}` has blocks that are tall and blocks that are wide, so over='short_side' would average "
            f"some over their rows and some over their columns. Use over='fan_in', or keep the blocks as "
            f"separate parameters."
        )
    return columns if choices == {False} else rows


def scale_rows(
    update: jax.Array,
    nu: jax.Array,
    view: MatrixView,
    axes: tuple[int, ...],
    *,
    beta2: Any,
    epsilon: float,
) -> tuple[jax.Array, jax.Array]:
    """One step of NorMuon on a leaf: the scaled update in at least float32, and the new mean squares."""
    u = update.astype(nu.dtype)
    b = jnp.asarray(beta2, nu.dtype)
    nu = b * nu + (1 - b) * mean_per_matrix(jnp.square(u), view, axes)
    scaled = u / jnp.maximum(jnp.sqrt(nu), epsilon)
    both = matrix_axes(view, u.ndim)
    before, after = (mean_per_matrix(jnp.square(x), view, both) for x in (u, scaled))
    # Zero stays zero: where `after` is zero, so is `before`.
    return scaled * jnp.sqrt(before / jnp.where(after == 0, 1, after)), nu


def normuon_by_views(
    views_of: ViewsOf, *, beta2: Any, epsilon: float, over: str
) -> optax.GradientTransformationExtraArgs:
    """`scale_by_normuon` with the views given."""

    def init(params: optax.Params) -> ScaleByNormuonState:
        leaves, treedef = jax.tree.flatten(params)
        nu = []
        for leaf, (path, view) in zip(leaves, views_of(params), strict=True):
            zeros = zeros_like_param(leaf, jnp.promote_types(jnp.float32, leaf.dtype))
            view = view.resolve(leaf.shape, path)
            nu.append(mean_per_matrix(zeros, view, _mean_axes(over, view, leaf.shape, path)))
        return ScaleByNormuonState(treedef.unflatten(nu))

    def update(updates: optax.Updates, state: Any, params: Any = None, **extra_args: Any):
        del extra_args
        leaves, treedef = jax.tree.flatten(updates)
        views = views_of(updates if params is None else params)
        result, moments = [], []
        for leaf, nu, (path, view) in zip(leaves, treedef.flatten_up_to(state.nu), views, strict=True):
            view = view.resolve(leaf.shape, path)
            axes = _mean_axes(over, view, leaf.shape, path)
            scaled, nu = scale_rows(leaf, nu, view, axes, beta2=beta2, epsilon=epsilon)
            result.append(scaled.astype(leaf.dtype))
            moments.append(nu)
        return treedef.unflatten(result), ScaleByNormuonState(treedef.unflatten(moments))

    return optax.GradientTransformationExtraArgs(init, update)


def scale_by_normuon(
    *,
    beta2: float | jax.Array = 0.95,
    epsilon: float = 1e-10,
    over: str = "fan_in",
    rules: Sequence[Rule] | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Divides each neuron's row of an orthogonalised update by its running RMS. Goes between `scale_by_muon`
    and the factor.

    Formula, for each matrix with update U:

        v <- b v + (1 - b) mean(U^2)                          (one number per output neuron: the mean is over
        fan-in) U' = U / max(sqrt(v), epsilon)
        update = U' |U|_F / |U'|_F

    Every layer of a stack, every expert and every block has its own v and norm.

    Args:
      beta2: b in [0, 1).
      epsilon: least divisor, dimensionless.
      over: 'fan_in' as in the paper, or 'short_side': over fan-in where fan_out >= fan_in, else over fan-out
        (modded-nanogpt, Emerging-Optimizers).
      rules: rules that override the built-in ones, as in `muon`; every leaf must come out as a matrix.

    Returns:
      A `GradientTransformationExtraArgs` with state `ScaleByNormuonState(nu)`. Updates keep their shapes,
      dtypes and shardings. Zero matrices stay zero. Extra arguments of `update` are ignored.

    Raises:
      ValueError, TypeError: an argument out of its range, a leaf without a matrix view, or blocks of both
        orientations under 'short_side'.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_muon import scale_by_normuon
      >>> transformation = scale_by_normuon()
      >>> updates = {"dense": {"kernel": jnp.array([[3.0, 0.0], [0.0, 1.0]])}}
      >>> updates, _ = transformation.update(updates, transformation.init(updates))
      >>> [round(x, 4) for x in jnp.diag(updates["dense"]["kernel"]).tolist()]   # same norm, equal neurons
      [2.2361, 2.2361]

    Note:
      State: one float32 number per neuron. Cost: a few passes over the update.

    References:
      NorMuon, arXiv 2510.05491, algorithm 1 (b = 0.95, epsilon = 1e-10, added to the root there).
    """
    check_unit_interval("beta2", beta2)
    check_not_negative("epsilon", epsilon)
    check_choice("over", over, ("fan_in", "short_side"))
    return normuon_by_views(
        views_from_rules("scale_by_normuon", rules), beta2=beta2, epsilon=epsilon, over=over
    )
