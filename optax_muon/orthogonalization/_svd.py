"""The exact polar factor by singular value decomposition, for reference and for small matrices."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from optax_muon.orthogonalization._normalization import unit_frobenius


def polar_factor(x: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
    """`U Vᵀ` over the non-zero singular values: zero in, zero out, and a rank-r matrix gives r singular
    values of 1.

    A singular value counts as zero below `eps max(m, n) σ_max`, the usual bound of what rounding produces.

    Args:
        x: float32 or float64.

    Returns:
        The same shape and dtype.
    """
    if 0 in x.shape:
        return x
    u, s, vt = jnp.linalg.svd(unit_frobenius(x), full_matrices=False)
    tolerance = float(jnp.finfo(x.dtype).eps) * max(x.shape[-2:])
    # Multiplied, not selected: NaN must stay visible.
    kept = jnp.where(s > tolerance * s[..., :1], 1.0, 0.0).astype(x.dtype)
    return jnp.matmul(u * kept[..., None, :], vt, precision=jax.lax.Precision.HIGHEST)
