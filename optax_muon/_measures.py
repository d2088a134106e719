"""Norms, angles and spread of singular values of the matrices in an array, on any mesh without gathering one.

The functions only multiply by thin matrices, whose results are summed over the devices.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from optax_muon.parameters import MatrixView, to_matrices


def update_rms(x: ArrayLike, view: MatrixView | None = None) -> Float[Array, "..."]:
    """The root mean square of an array's entries.

    Formula: `sqrt(mean(x^2))`, in at least float32 and without overflow.

    Args:
      x: any shape, floating: an update, a gradient or a weight.
      view: which axes form matrices; one value for each matrix.

    Returns:
      A scalar, or [n] with a view.

    Raises:
      TypeError: x is not floating.
      ValueError: the view does not fit.

    Example:
      >>> float(update_rms(jnp.array([3.0, -3.0])))
      3.0

    References:
      Moonlight, arXiv 2502.16982, section 2.2: 0.2 to 0.4 in AdamW runs.
    """
    return _measure(_rms, view, (x,))


def spectral_norm(
    x: ArrayLike, view: MatrixView | None = None, *, iterations: int = 16
) -> Float[Array, "..."]:
    """The largest singular value of each matrix, by Lanczos steps on its Gram matrix, from below.

    Formula: `max_v |X^T v| / |v|` over the vectors v that the steps span.

    Args:
      x: a matrix [m, n] or a stack [*batch, m, n]; with a view, any shape it fits. Floating.
      view: which axes form matrices.
      iterations: Lanczos steps, each two products of the matrix with one vector. Exact (to rounding) when
        there are as many as the short side is long; 16 are within 0.1 % on Gaussian matrices with sides up to
        1024.

    Returns:
      [*batch], or [n] with a view.

    Raises:
      TypeError: x is not floating.
      ValueError: x has rank below 2, or the view does not fit.

    Example:
      >>> float(spectral_norm(jnp.diag(jnp.array([3.0, 1.0, 2.0]))))
      3.0

    References:
      Golub and Van Loan, Matrix Computations, section 10.1.
    """
    return _measure(_lanczos, view, (x,), iterations)


def polar_error(x: ArrayLike, view: MatrixView | None = None, *, probes: int = 32) -> Float[Array, "..."]:
    """How far the singular values of each matrix are from one value: 0 for multiples of orthogonal ones.

    Formula: `|X X^T / s^2 - I|_F / sqrt(m)` over the short side m, with s^2 the mean square of the m singular
    values: the relative spread of the squared singular values. Scale plays no part. About 0.3 for five Keller
    steps on a Gaussian matrix; sqrt(m / r - 1) for an exactly orthogonalised matrix of rank r.

    Args:
      x: a matrix [m, n] or a stack [*batch, m, n]; with a view, any shape it fits. Floating.
      view: which axes form matrices.
      probes: random vectors for the Frobenius norm. Exact for short sides up to this; beyond, an unbiased
        estimate of its square, within about sqrt(2 / (probes * m)) of it (the same vectors at every call).

    Returns:
      [*batch], or [n] with a view. 1 for a zero matrix.

    Raises:
      TypeError: x is not floating.
      ValueError: x has rank below 2, or the view does not fit.

    Example:
      >>> float(polar_error(5.0 * jnp.eye(3))), round(float(polar_error(jnp.diag(jnp.array([1.0, 0.0])))), 6)
      (0.0, 1.0)

    Note:
      Of an update as `muon` returns it the weight decay is part.

    References:
      Hutchinson's estimator: Girard 1989, Hutchinson 1990.
    """
    return _measure(_spread, view, (x,), probes)


def cosine(x: ArrayLike, y: ArrayLike, view: MatrixView | None = None) -> Float[Array, "..."]:
    """The cosine of the angle between two arrays.

    Formula: `<x, y> / (|x| |y|)`; 0 where one of them is zero.

    Args:
      x: any shape, floating.
      y: same shape.
      view: which axes form matrices; one value for each matrix.

    Returns:
      A scalar, or [n] with a view.

    Raises:
      TypeError: x is not floating.
      ValueError: the shapes differ, or the view does not fit.

    Example:
      >>> round(float(cosine(jnp.array([1.0, 1.0]), jnp.array([2.0, 0.0]))), 4)
      0.7071
    """
    if jnp.shape(x) != jnp.shape(y):
        raise ValueError(
            f"cosine: x has shape {jnp.shape(x)}, but y {jnp.shape(y)}. Give arrays of one shape."
        )
    return _measure(_cosine, view, (x, y))


def singular_values(x: ArrayLike, view: MatrixView | None = None) -> Float[Array, "..."]:
    """All singular values of each matrix, in descending order, by an SVD: for plots, not for every step.

    Formula: the `s_i` of `X = U diag(s) V^T`, computed by `jnp.linalg.svd` in at least float32.

    Args:
      x: a matrix [m, n] or a stack [*batch, m, n]; with a view, any shape it fits. Floating.
      view: which axes form matrices; all of one shape.

    Returns:
      [*batch, min(m, n)], or [n, min(fan_in, fan_out)] with a view.

    Raises:
      TypeError: x is not floating.
      ValueError: x has rank below 2, the view does not fit, or it has blocks of several shapes.

    Example:
      >>> singular_values(jnp.diag(jnp.array([1.0, 3.0]))).tolist()
      [3.0, 1.0]
    """
    return _measure(_svd, view, (x,), 0)


# --- arithmetic on stacks of matrices [n, rows, columns], or on whole arrays where `number` is None


def _measure(
    measure: Callable[..., Array], view: MatrixView | None, arrays: Sequence[Any], number: int | None = None
) -> Array:
    """Checks, then one value for each matrix.

    Args:
        measure: takes stacks (and `number`), or arrays and the axes to reduce where there is no number.
        view: which axes form matrices.
        arrays: of one shape.
        number: of iterations or probes; None for what needs no matrix.
    """
    arrays = tuple(jnp.asarray(x) for x in arrays)
    first = arrays[0]
    if not jnp.issubdtype(first.dtype, jnp.floating):
        raise TypeError(f"diagnostics measure floating arrays, got {first.dtype}. Cast it first.")
    if view is None and number is not None and first.ndim < 2:
        raise ValueError(
            f"x has shape {first.shape}, but a matrix has rank 2, a stack of matrices more. Give a view=, or "
            f"reshape it."
        )
    if view is not None:
        view = view.resolve(first.shape, "x")
    return _compiled(measure, view, number, *arrays)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _compiled(
    measure: Callable[..., Array], view: MatrixView | None, number: int | None, *arrays: Array
) -> Array:
    """The measure with the compiler placing what is in between, also on Explicit meshes; a replicated result."""
    run: Callable[..., Any] = functools.partial(_stack_by_stack, measure, view, number)
    mesh = next((m for m in (jax.typeof(x).sharding.mesh for x in arrays) if not m.empty), None)
    if mesh is not None:
        kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
        explicit = tuple(name for name, kind in kinds if kind == AxisType.Explicit)
        if explicit:
            everywhere = NamedSharding(mesh, PartitionSpec())
            run = jax.sharding.auto_axes(run, axes=explicit, out_sharding=everywhere)
    return run(*arrays)


def _stack_by_stack(
    measure: Callable[..., Array], view: MatrixView | None, number: int | None, *arrays: Array
) -> Array:
    arrays = tuple(x.astype(jnp.promote_types(jnp.float32, x.dtype)) for x in arrays)
    shape = arrays[0].shape
    if view is not None:
        last = (1, 2) if number is None else number
        stacks = zip(*(to_matrices(x, view) for x in arrays), strict=True)
        return jnp.concatenate([measure(*stack, last) for stack in stacks])
    if number is None:
        return measure(*arrays, tuple(range(len(shape))))
    out = measure(*(x.reshape(-1, *shape[-2:]) for x in arrays), number)
    return out.reshape(*shape[:-2], *out.shape[1:])


def _unit(x: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """An array divided by its largest magnitude along the axes, and that magnitude."""
    largest = jnp.max(jnp.abs(x), axis=axes, initial=0, keepdims=True)
    return x / jnp.where(largest == 0, 1, largest), jnp.squeeze(largest, axes)


def _rms(x: Array, axes: tuple[int, ...]) -> Array:
    x, largest = _unit(x, axes)
    return largest * jnp.sqrt(jnp.mean(x**2, axis=axes))


def _cosine(x: Array, y: Array, axes: tuple[int, ...]) -> Array:
    (x, _), (y, _) = _unit(x, axes), _unit(y, axes)
    norms = jnp.sqrt(jnp.sum(x**2, axis=axes)) * jnp.sqrt(jnp.sum(y**2, axis=axes))
    return jnp.sum(x * y, axis=axes) / jnp.where(norms == 0, 1, norms)


def _svd(x: Array, _: int) -> Array:
    return jnp.linalg.svd(x, compute_uv=False)


def _short_first(x: Array) -> Array:
    return x if x.shape[1] <= x.shape[2] else x.mT


def _times(x: Array, y: Array) -> Array:
    """X X^T y for a stack of short-by-long matrices, never forming X X^T."""
    dot = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    return dot(x, dot(x.mT, y))


def _lanczos(x: Array, iterations: int) -> Array:
    x, largest = _unit(_short_first(x), (1, 2))
    n, side, _ = x.shape
    start = jax.random.normal(jax.random.key(0), (side,), x.dtype)
    v = jnp.broadcast_to((start / jnp.linalg.norm(start))[:, None], (n, side, 1))

    def step(carry: tuple, _: None) -> tuple[tuple, tuple]:
        before, v, beta = carry
        w = _times(x, v) - beta * before
        alpha = jnp.sum(w * v, axis=1, keepdims=True)
        w = w - alpha * v
        beta = jnp.sqrt(jnp.sum(w**2, axis=1, keepdims=True))
        return (v, w / jnp.where(beta == 0, 1, beta), beta), (alpha[:, 0, 0], beta[:, 0, 0])

    none = jnp.zeros((n, 1, 1), x.dtype)
    _, (alphas, betas) = lax.scan(step, (jnp.zeros_like(v), v, none), length=max(1, min(iterations, side)))
    off = jax.vmap(functools.partial(jnp.diag, k=1))(betas[:-1].T)
    tridiagonal = jax.vmap(jnp.diag)(alphas.T) + off + off.mT
    top = jnp.linalg.eigvalsh(tridiagonal)[:, -1]
    return largest * jnp.sqrt(jnp.maximum(top, 0))


def _spread(x: Array, probes: int) -> Array:
    x, _ = _unit(_short_first(x), (1, 2))
    _, side, _ = x.shape
    square = jnp.sum(x**2, axis=(1, 2), keepdims=True) / side
    if side <= probes:
        z, count = jnp.eye(side, dtype=x.dtype), side
    else:
        z, count = jax.random.rademacher(jax.random.key(1), (side, probes), x.dtype), side * probes
    error = _times(x, z) / jnp.where(square == 0, 1, square) - z
    return jnp.sqrt(jnp.sum(error**2, axis=(1, 2)) / count)
