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
    x = unit_frobenius(x)
    for step, (a, b, c) in enumerate(coefficients):
        gram = products.gram(x)
        if step == 0:
            scale = gram_scale(gram, normalization)
            x = scale * x
            gram = scale * gram * (scale if isinstance(scale, float) else jnp.swapaxes(scale, -1, -2))
        polynomial = b * gram + c * products.symmetric(gram, gram) if c else b * gram
        x = a * x + products.matmul(polynomial, x)
    return x
