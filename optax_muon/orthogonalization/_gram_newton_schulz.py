"""Newton-Schulz on the small Gram matrix: the same polynomial of X, with two wide products instead of ten.

A step needs R = X Xᵀ only: X <- M X with M = a I + Z, Z = b R + c R², hence R <- R M². The product of all M
is applied to X at the end. Two things keep rounding from being amplified by the slope of the polynomial at 0:

- The accumulated factor is kept as `s I + D` with s the product of the slopes, and X is multiplied by `s`
apart from the product
  `D X`. So no identity is ever rounded, the null space of X sees exact arithmetic, and with narrow matmul
  inputs the noise of rounding X is amplified only where D is large, as in the standard iteration. (Measured
  with bfloat16 inputs, KELLER, rank one: largest error .75 with Q X, .058 with `s X + D X` and the restart of
  `restart_schedule`; standard .050.)
- A restart applies the factor and forms R from the matrix again. What R cannot resolve, singular values below
the square root of
  the rounding unit, would otherwise be amplified by the slope of the whole composition.

The products of n x n matrices are all of symmetric polynomials of R, and always run in (at least) float32.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from optax_muon.orthogonalization._coefficients import CUBIC, KELLER, Coefficients
from optax_muon.orthogonalization._newton_schulz import first_gram
from optax_muon.orthogonalization._normalization import Normalization
from optax_muon.orthogonalization._symmetric_matmul import Products

# The largest slope at 0 that the steps between two restarts may have together. Measured over 20 spectra (rank
# one, low rank plus noise, exponential and power decay, condition 1e8), alpha 1 and 4, n = 64, every
# published set: with these the error stays within a few times that of the standard iteration (float32: 3e-5
# to 5e-4; 1.2 to 2.5 times the standard's with bfloat16).
SLOPE_LIMIT = {"wide": 150.0, "narrow": 62.0}
# Measured exceptions to the rule, the first whose side is reached. KELLER in float32 without a restart has an
# error of 2.1e-3 to 3.2e-3 on those spectra (2.5e-5 on Gaussian matrices), where one restart gives 3e-5
# (2e-6), for 44 % of the standard arithmetic at alpha = 4 instead of 54 %. Small matrices cost little, so
# they keep the accuracy.
_MEASURED = {
    (KELLER, "wide"): ((512, ()), (0, (3,))),
    (CUBIC, "narrow"): ((0, (2,)),),
}
# Beyond these, spectra were found whose singular values leave the band of the polynomial or overflow.
UNSAFE_SLOPE = {"wide": 1500.0, "narrow": 500.0}


def gram_newton_schulz(
    x: Float[Array, "*batch m n"],
    coefficients: Coefficients,
    normalization: Normalization,
    products: Products,
    restarts: tuple[int, ...],
) -> Float[Array, "*batch m n"]:
    """`U p(Σ) Vᵀ`, equal to the standard iteration up to rounding.

    Args:
        x: float32 or float64 with m <= n.
        coefficients: one triple per step.
        normalization: how X is scaled first.
        products: how products with X are computed; those of Gram matrices use the dtype of X.
        restarts: the steps before which the factor is applied and the Gram matrix formed anew.

    Returns:
        The same shape and dtype.
    """
    small = products.with_dtype(x.dtype)
    x, gram = first_gram(x, normalization, products)
    bounds = (0, *restarts, len(coefficients))
    for start, stop in itertools.pairwise(bounds):
        if start:
            gram = products.gram(x)
        slope, factor = _accumulate(gram, coefficients[start:stop], small)
        x = slope * x + products.matmul(factor, x)
    return x


def _accumulate(gram: Array, coefficients: Coefficients, small: Products) -> tuple[float, Array]:
    """The factor of some steps on X, as `slope I + D`."""
    slope, factor = 1.0, jnp.zeros_like(gram)
    for step, (a, b, c) in enumerate(coefficients):
        z = b * gram + c * small.symmetric(gram, gram) if c else b * gram
        factor = z if step == 0 else a * factor + slope * z + small.symmetric(factor, z)
        slope *= a
        if step + 1 < len(coefficients):
            half = a * gram + small.symmetric(gram, z)
            gram = a * half + small.symmetric(half, z)
    return slope, factor


def restart_schedule(coefficients: Coefficients, dtype: Any, short: int) -> tuple[int, ...]:
    """The steps before which to restart: as late and as few as the slope limit of the dtype allows.

    Args:
        coefficients: one triple per step.
        dtype: of the inputs of products with X.
        short: the short side of X.
    """
    width = input_width(dtype)
    for from_side, measured in _MEASURED.get((coefficients, width), ()):
        if short >= from_side:
            return measured
    restarts, slope = [], 1.0
    for step, (a, _, _) in enumerate(coefficients):
        if step and slope * abs(a) > SLOPE_LIMIT[width]:
            restarts.append(step)
            slope = 1.0
        slope *= abs(a)
    return tuple(restarts)


def largest_slope(coefficients: Coefficients, restarts: tuple[int, ...]) -> float:
    """The largest slope at 0 of the steps between two restarts, which is what amplifies rounding."""
    return max(math.prod(abs(a) for a, _, _ in part) for part in _parts(coefficients, restarts))


def input_width(dtype: Any) -> str:
    return "wide" if jnp.dtype(dtype).itemsize >= 4 else "narrow"


def _parts(coefficients: Coefficients, restarts: tuple[int, ...]) -> Iterator[Coefficients]:
    for start, stop in itertools.pairwise((0, *restarts, len(coefficients))):
        yield coefficients[start:stop]


def gram_flops(
    short: int, long: int, coefficients: Coefficients, restarts: tuple[int, ...], symmetric: float
) -> tuple[float, float]:
    """Operations of one matrix: in products with X, and in products of Gram matrices.

    `symmetric` is the share of a product that a symmetric one costs.
    """
    wide, cube = 2.0 * long * short**2, 2.0 * short**3 * symmetric
    on_x = on_gram = 0.0
    for part in _parts(coefficients, restarts):
        on_x += wide * symmetric + wide
        on_gram += cube * (sum(1 for _, _, c in part if c) + 3 * (len(part) - 1))
    return on_x, on_gram
