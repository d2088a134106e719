"""Means within each matrix of a leaf, without taking it apart: every slice of a stack, every block alone."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from optax_muon.parameters import MatrixView, from_matrices, to_matrices
from optax_muon.transforms._replicate import replicate


def matrix_axes(view: MatrixView, ndim: int) -> tuple[int, ...]:
    """The axes of a leaf that are rows or columns, in order."""
    batch = view.batch_axes(ndim)
    return tuple(axis for axis in range(ndim) if axis not in batch)


def rows_and_columns(view: MatrixView) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The two sets of axes of a view."""
    rows, columns = view.reduction_axes, view.output_axes
    return (
        (rows,) if isinstance(rows, int) else tuple(rows),
        (columns,) if isinstance(columns, int) else tuple(columns),
    )


def mean_per_matrix(x: jax.Array, view: MatrixView, axes: Sequence[int]) -> jax.Array:
    """Mean of x over `axes` within each matrix, as an array that broadcasts against x.

    Axes that no block cuts become side 1 by a plain reduction, so that nothing is gathered on a mesh. Axes
    that blocks cut keep their length, and each entry holds the mean of its own block.

    Args:
      x: a leaf, floating.
      view: its resolved view.
      axes: some of the view's row and column axes.
    """
    cuts = view.cuts
    cut = dict.fromkeys(c.axis for c in cuts if c.axis in axes)
    x = jnp.mean(x, axis=tuple(axis for axis in axes if axis not in cut), keepdims=True)
    for axis in cut:
        along = MatrixView((axis,), (x.ndim,), tuple(c for c in cuts if c.axis == axis))
        column = replicate(x)[..., None]
        means = [jnp.broadcast_to(jnp.mean(m, 1, keepdims=True), m.shape) for m in to_matrices(column, along)]
        x = from_matrices(means, along, column.shape)[..., 0]
    return x
