"""The shape factor as a transformation of its own."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_muon.parameters import MatrixView, Rule, from_matrices, to_matrices
from optax_muon.transforms._views import ViewsOf, views_from_rules
from optax_muon.transforms.shape_factors import SqrtMax, SqrtRatio, SqrtRatioMinOne, sqrt_max

ShapeFactor = SqrtMax | SqrtRatio | SqrtRatioMinOne


def leaf_factor(factor: ShapeFactor, view: MatrixView, shape: tuple[int, ...]) -> np.ndarray:
    """The factor of each entry of a leaf, as an array that broadcasts against the leaf.

    One number without blocks. With blocks, each block has the factor of its own shape, and the array extends
    along the axes that the blocks divide and has side 1 along the others.
    """
    factors = [factor.factor(s.fan_in, s.fan_out) for s in view.matrix_shapes(shape)]
    if len(set(factors)) == 1:
        return np.full((1,) * len(shape), factors[0], np.float32)
    divided = {cut.axis for cut in view.resolve(shape).cuts}
    thin = tuple(side if axis in divided else 1 for axis, side in enumerate(shape))
    with jax.ensure_compile_time_eval():
        blocks = to_matrices(jnp.zeros(thin), view)
        filled = tuple(jnp.full(b.shape, f) for b, f in zip(blocks, factors, strict=True))
        return np.asarray(from_matrices(filled, view, thin))


def scale_by_views(factor: ShapeFactor, views_of: ViewsOf) -> optax.GradientTransformationExtraArgs:
    """`scale_by_shape` with the views given."""

    def init(params: optax.Params) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update(updates: optax.Updates, state: Any, params: Any = None, **extra_args: Any):
        del extra_args
        leaves, treedef = jax.tree.flatten(updates)
        views = views_of(updates if params is None else params)
        scaled = []
        for leaf, (_, view) in zip(leaves, views, strict=True):
            array = leaf_factor(factor, view, leaf.shape)
            scaled.append(leaf * (array.item() if array.size == 1 else jnp.asarray(array, leaf.dtype)))
        return treedef.unflatten(scaled), state

    return optax.GradientTransformationExtraArgs(init, update)


def scale_by_shape(
    factor: ShapeFactor = sqrt_max(0.2),  # noqa: B008  (a frozen value)
    *,
    rules: Sequence[Rule] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Multiplies each matrix by a factor of its fan-in and fan-out.

    Formula: `u <- f(fan_in, fan_out) * u`, where the fans come from the leaf's matrix view (never from axis
    order), and each block of a fused weight has the factor of its own shape.

    Args:
      factor: a value of `optax_muon.shape_factors`.
      rules: rules that override the built-in ones, as in `muon`.

    Returns:
      A stateless `optax.GradientTransformationExtraArgs`; shapes, dtypes and shardings of the updates are
      kept. Extra arguments of `update` are ignored.

    Raises:
      ValueError: a leaf is no matrix.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_muon import scale_by_shape, shape_factors
      >>> transformation = scale_by_shape(shape_factors.sqrt_ratio_min_one())
      >>> updates = {"dense": {"kernel": jnp.ones((4, 16))}}
      >>> updates, _ = transformation.update(updates, transformation.init(updates))
      >>> float(updates["dense"]["kernel"][0, 0])
      2.0

    References:
      Moonlight, arXiv 2502.16982, section 2.2; Keller Jordan's muon.py.
    """
    return scale_by_views(factor, views_from_rules("scale_by_shape", rules))
