"""Scaling a matrix so that the iteration converges: exact over the whole float range, per matrix of a stack.

Every form first divides by the largest entry, then by the Frobenius norm, so that squares neither overflow
nor vanish. There is no epsilon: a common factor on all gradients changes nothing, zero maps to zero, NaN and
infinity stay visible. Published code divides by `norm + 1e-6` or `+ 1e-7` instead, which differs by that
amount relative to the norm while the norm is near 1, and which stops normalising where the norm falls to the
epsilon.
"""

import dataclasses
import math
from typing import Any, TypeAlias

import jax.numpy as jnp
from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True)
class _Safety:
    safety: Any = 1.0

    def __post_init__(self):
        name = type(self).__name__
        if isinstance(self.safety, bool) or not isinstance(self.safety, int | float):
            raise TypeError(
                f"{name}: safety={self.safety!r} must be a number >= 1, for example {name}(safety=1.02)."
            )
        if not (self.safety >= 1.0 and math.isfinite(self.safety)):
            raise ValueError(
                f"{name}: safety={self.safety} must be finite and >= 1, for example {name}(safety=1.02)."
            )
        object.__setattr__(self, "safety", float(self.safety))


class Frobenius(_Safety):
    """`X / (safety ‖X‖_F)`: no singular value is above `1 / safety`.

    A safety above 1 leaves the coefficients room for rounding, or is part of a published recipe (1.02 with
    `POLAR_EXPRESS_5`).

    Example:
        >>> Frobenius(safety=1.02)
        Frobenius(safety=1.02)
    """


class Schatten(_Safety):
    """`X / (safety ‖X‖_S4)` with the Schatten norm `‖X‖_S4 = (Σ σ⁴)^(1/4) = ‖X Xᵀ‖_F^(1/2)`, from the first
    Gram matrix.

    It bounds the largest singular value more tightly than the Frobenius norm, so small ones start higher: by
    √(rank) for a flat spectrum against rank^(1/4), and it costs nothing, the Gram matrix being needed anyway.

    Example:
        >>> Schatten()
        Schatten(safety=1.0)
    """


class AOL(_Safety):
    """`diag(s) X / safety` with `s_i = (Σ_j |X Xᵀ|_ij)^(-1/2)`, rows being the short side; from the first
    Gram matrix.

    Rows are rescaled, so what follows converges to the polar factor of `diag(s) X`, not of X: equivariance
    under rotations of the short side is lost. Permutations and signs are kept.

    Example:
        >>> AOL()
        AOL(safety=1.0)

    Source: arXiv 2512.04632 (Turbo-Muon), after arXiv 2208.03160.
    """


Normalization: TypeAlias = Frobenius | Schatten | AOL

_BY_NAME = {"frobenius": Frobenius(), "schatten": Schatten(), "aol": AOL()}


def as_normalization(value: Any) -> Normalization:
    """A normalisation from its name or itself."""
    if isinstance(value, Frobenius | Schatten | AOL):
        return value
    if isinstance(value, str) and value in _BY_NAME:
        return _BY_NAME[value]
    options = ", ".join(map(repr, _BY_NAME))
    error = ValueError if isinstance(value, str) else TypeError
    raise error(
        f"Orthogonalizer: normalization={value!r} is unknown. Write one of {options}, or a value such as "
        "Frobenius(safety=1.02)."
    )


def unit_frobenius(x: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
    """`X / ‖X‖_F` for every matrix of the stack, over the whole range of the dtype; zero (or subnormal) in,
    zero out.

    Args:
        x: float32 or float64. Narrower dtypes are to be widened before, not after: float16 squares overflow
            at 256.

    Returns:
        The same shape and dtype.
    """
    largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True, initial=0.0)
    # XLA divides by multiplying with the reciprocal, which is subnormal, that is zero, for the largest
    # quarter of the exponents.
    smaller = jnp.where(largest > 1, 1 / 16, 1.0).astype(x.dtype)
    x = (x * smaller) / jnp.where(largest == 0, 1, largest * smaller)
    norm = jnp.sqrt(jnp.sum(x * x, axis=(-2, -1), keepdims=True))
    return x / jnp.where(norm == 0, 1, norm)


def gram_scale(
    gram: Float[Array, "*batch m m"], normalization: Normalization
) -> Float[Array, "*batch #m 1"] | float:
    """The factor on the rows of X that completes the normalisation, given the Gram matrix of the
    unit-Frobenius X.
    """
    if isinstance(normalization, Schatten):
        norm = jnp.sqrt(jnp.sqrt(jnp.sum(gram * gram, axis=(-2, -1), keepdims=True)))
        return 1 / (normalization.safety * jnp.where(norm == 0, 1, norm))
    if isinstance(normalization, AOL):
        row = jnp.sqrt(jnp.sum(jnp.abs(gram), axis=-1, keepdims=True))
        return 1 / (normalization.safety * jnp.where(row == 0, 1, row))
    return 1 / normalization.safety
