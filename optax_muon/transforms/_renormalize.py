"""Exact Frobenius norm of an orthogonalised update."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_muon.parameters import MatrixView, Rule
from optax_muon.transforms._per_matrix import matrix_axes, mean_per_matrix
from optax_muon.transforms._scale_by_shape import leaf_factor
from optax_muon.transforms._views import ViewsOf, views_from_rules
from optax_muon.transforms.shape_factors import sqrt_max


def with_exact_norm(update: jax.Array, view: MatrixView) -> jax.Array:
    """The update at an orthogonal matrix's Frobenius norm, sqrt(min(fan_in, fan_out)), at least float32."""
    u = update.astype(jnp.promote_types(jnp.float32, update.dtype))
    both = matrix_axes(view, u.ndim)
    rms = jnp.sqrt(mean_per_matrix(jnp.square(u), view, both))
    # An orthogonal matrix has entries of RMS 1 / sqrt(max(fan_in, fan_out)).
    nominal = 1 / jnp.asarray(leaf_factor(sqrt_max(1.0), view, u.shape), u.dtype)
    return u * (nominal / jnp.where(rms == 0, 1, rms))


def renormalize_by_views(views_of: ViewsOf) -> optax.GradientTransformationExtraArgs:
    """`renormalize` with the views given."""

    def init(params: optax.Params) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update(updates: optax.Updates, state: Any, params: Any = None, **extra_args: Any):
        del extra_args
        leaves, treedef = jax.tree.flatten(updates)
        views = views_of(updates if params is None else params)
        result = [
            with_exact_norm(leaf, view.resolve(leaf.shape, path)).astype(leaf.dtype)
            for leaf, (path, view) in zip(leaves, views, strict=True)
        ]
        return treedef.unflatten(result), state

    return optax.GradientTransformationExtraArgs(init, update)


def renormalize(*, rules: Sequence[Rule] | None = None) -> optax.GradientTransformationExtraArgs:
    r"""Puts every orthogonalised matrix at the Frobenius norm that an orthogonal one has. Goes after
    `scale_by_muon`.

    Formula, for each matrix with update U:

        update = U sqrt(min(fan_in, fan_out)) / |U|_F

    so that a shape factor c sqrt(max(fan_in, fan_out)) gives an update of RMS exactly c. Without it the RMS
    is c times the RMS of the singular values that the iteration reached: 0.89 c for five Keller steps on a
    Gaussian gradient, 0.3 c where the gradient has low rank. Every layer of a stack, every expert and every
    block is scaled alone; zero stays zero.

    Args:
      rules: rules that override the built-in ones, as in `muon`; every leaf must come out as a matrix.

    Returns:
      A stateless `GradientTransformationExtraArgs`. Updates keep their shapes, dtypes and shardings. Extra
      arguments of `update` are ignored.

    Raises:
      ValueError: a leaf without a matrix view.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_muon import renormalize
      >>> transformation = renormalize()
      >>> updates = {"dense": {"kernel": jnp.diag(jnp.array([1.0, 0.0, 0.0, 0.0]))}}    # of rank 1
      >>> updates, _ = transformation.update(updates, transformation.init(updates))
      >>> float(jnp.linalg.norm(updates["dense"]["kernel"]))
      2.0

    Note:
      On a gradient of rank r the few directions there are move sqrt(min(fan_in, fan_out) / r) times further.

    References:
      The update RMS is that of Moonlight, arXiv 2502.16982, section 2.2, made exact.
    """
    return renormalize_by_views(views_from_rules("renormalize", rules))
