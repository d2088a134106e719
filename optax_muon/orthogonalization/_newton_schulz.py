"""The standard Newton-Schulz iteration, `X <- a X + (b A + c A A) X` with `A = X Xᵀ`."""

import itertools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from optax_muon.orthogonalization._coefficients import Coefficients
from optax_muon.orthogonalization._normalization import Frobenius, Normalization, gram_scale, unit_frobenius
from optax_muon.orthogonalization._symmetric_matmul import Products

_OVERFLOWN = 1e6


def newton_schulz(
    x: Float[Array, "*batch m n"],
    coefficients: Coefficients,
    normalization: Normalization,
    products: Products,
) -> Float[Array, "*batch m n"]:
    """`U p(Σ) Vᵀ` for the normalised input `U Σ Vᵀ`, with p the composition of the steps.

    X keeps its (at least) float32 between steps; only the inputs of products are rounded to the compute
    dtype. That costs the same as keeping X itself in the narrow dtype and is 10 to 30 times more accurate.
    The steps are a loop, so that compiling a shape takes the time of one step (224 matrices of an 8B model
    for 64 TPU chips, processor time: 5.7 s against 17 s with all steps written out). Runs of cubic steps
    (c = 0), which save a product, are loops of their own, and the first step is apart where the normalisation
    has formed its Gram matrix.

    Args:
        x: float32 or float64 with m <= n.
        coefficients: one triple per step.
        normalization: how X is scaled first.
        products: how matrix products are computed.

    Returns:
        The same shape and dtype.
    """

    def step(x: Array, gram: Array, a: Any, b: Any, c: Any, quintic: bool) -> Array:
        polynomial = b * gram + c * products.symmetric(gram, gram) if quintic else b * gram
        return a * x + products.matmul(polynomial, x)

    steps = list(coefficients)
    if isinstance(normalization, Frobenius):
        x = unit_frobenius(x) / normalization.safety
    else:
        x, gram = first_gram(x, normalization, products)
        first = steps.pop(0)
        x = step(x, gram, *first, bool(first[2]))
    for quintic, triples in itertools.groupby(steps, lambda triple: bool(triple[2])):

        def turn(x: Array, triple: Array, quintic: bool = quintic) -> tuple[Array, None]:
            a, b, c = triple
            return step(x, products.gram(x), a, b, c, quintic), None

        x, _ = lax.scan(turn, x, jnp.asarray(list(triples), x.dtype))
    return x


def first_gram(
    x: Float[Array, "*batch m n"], normalization: Normalization, products: Products
) -> tuple[Float[Array, "*batch m n"], Float[Array, "*batch m m"]]:
    """The normalised matrix and its Gram matrix; forms of normalisation that need a Gram matrix share this
    one.
    """
    x = unit_frobenius(x)
    gram = products.gram(x)
    scale = gram_scale(gram, normalization)
    if isinstance(scale, float):
        return (x, gram) if scale == 1.0 else (scale * x, scale * scale * gram)
    return scale * x, scale * gram * jnp.swapaxes(scale, -1, -2)


def largest_value(coefficients: Coefficients, start: float, rounding: float) -> float:
    """The largest singular value that can come out when none above `start` goes in and every step may find
    its input larger by the factor `1 + rounding`.

    With `rounding=0` the end of the published band. A set that is steep just beyond the range of the step
    before (CANS) turns a rounding error there into an overflow within the next steps.
    """
    largest = start
    for a, b, c in coefficients:
        s = np.linspace(0.0, largest * (1 + rounding), 2001)
        largest = float(np.abs(a * s + b * s**3 + c * s**5).max())
        if not largest < _OVERFLOWN:
            return math.inf
    return largest


def newton_schulz_flops(short: int, long: int, coefficients: Coefficients, symmetric: float) -> float:
    """Operations of one matrix; `symmetric` is the share of a product that a symmetric one costs."""
    wide, cube = 2.0 * long * short**2, 2.0 * short**3
    return sum(wide * symmetric + (cube * symmetric if c else 0.0) + wide for _, _, c in coefficients)
