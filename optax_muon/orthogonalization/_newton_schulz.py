"""The standard Newton-Schulz iteration, `X <- a X + (b A + c A A) X` with `A = X Xᵀ`."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from optax_muon.orthogonalization._coefficients import Coefficients
from optax_muon.orthogonalization._normalization import Normalization, gram_scale, unit_frobenius
from optax_muon.orthogonalization._symmetric_matmul import Products


def newton_schulz(
    x: Float[Array, "*batch m n"],
    coefficients: Coefficients,
    normalization: Normalization,
    products: Products,
) -> Float[Array, "*batch m n"]:
    """`U p(Σ) Vᵀ` for the normalised input `U Σ Vᵀ`, with p the composition of the steps.

    X keeps its (at least) float32 between steps; only the inputs of products are rounded to the compute
    dtype. That costs the same as keeping X itself in the narrow dtype and is 10 to 30 times more accurate.
    The steps are written out, not looped over: their number is small, a cubic step (c = 0) saves a product,
    and the last one may differ.

    Args:
        x: float32 or float64 with m <= n.
        coefficients: one triple per step.
        normalization: how X is scaled first.
        products: how matrix products are computed.

    Returns:
        The same shape and dtype.
    """
    for step, (a, b, c) in enumerate(coefficients):
        if step == 0:
            x, gram = first_gram(x, normalization, products)
        else:
            gram = products.gram(x)
        polynomial = b * gram + c * products.symmetric(gram, gram) if c else b * gram
        x = a * x + products.matmul(polynomial, x)
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


def newton_schulz_flops(short: int, long: int, coefficients: Coefficients, symmetric: float) -> float:
    """Operations of one matrix; `symmetric` is the share of a product that a symmetric one costs."""
    wide, cube = 2.0 * long * short**2, 2.0 * short**3
    return sum(wide * symmetric + (cube * symmetric if c else 0.0) + wide for _, _, c in coefficients)
