"""`orthogonalize`: arrays meet views outside training."""

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from optax_muon.orthogonalization import Orthogonalizer
from optax_muon.parameters import MatrixView, from_matrices, to_matrices

_DEFAULT = Orthogonalizer()


def orthogonalize(
    x: ArrayLike, orthogonalizer: Orthogonalizer = _DEFAULT, view: MatrixView | None = None
) -> Float[Array, "..."]:
    """The orthogonalised matrices of an array.

    Formula: `U Σ Vᵀ` becomes `U p(Σ / ‖Σ‖) Vᵀ`, with p, the composed polynomial of the orthogonalizer, close to
    1 (with `method="svd"` exactly 1, and 0 for what counts as a zero singular value).

    Args:
        x: without a view a matrix [m, n] or a stack [*batch, m, n], each matrix handled alone. With a view,
            any shape that the view fits. Real and floating.
        orthogonalizer: method, coefficients, normalisation and precision.
        view: which axes of x form the rows and which the columns, and the blocks within; every other axis is
            a batch axis.

    Returns:
        The same shape and dtype as x. The scale of x plays no part; zero matrices stay zero.

    Raises:
        TypeError: x is complex, integer or boolean, or the orthogonalizer is not an `Orthogonalizer`.
        ValueError: x has rank below 2, or the view does not fit its shape.

    Example:
        >>> import jax.numpy as jnp
        >>> from optax_muon.orthogonalization import Orthogonalizer
        >>> x = jnp.array([[3.0, 0.0], [0.0, -0.1]])
        >>> orthogonalize(x, Orthogonalizer(method="svd")).tolist()
        [[1.0, 0.0], [0.0, -1.0]]

    References:
        Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024; the sets of
        coefficients name theirs.
    """
    if not isinstance(orthogonalizer, Orthogonalizer):
        raise TypeError(
            f"orthogonalize: orthogonalizer={orthogonalizer!r} is no Orthogonalizer. Write "
            "Orthogonalizer(...)."
        )
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"orthogonalize: x has dtype {x.dtype}, but only real floating matrices have an "
            "orthogonalisation here. "
            "Split a complex matrix into its real and imaginary parts, or cast an integer one."
        )
    if x.ndim < 2:
        raise ValueError(
            f"orthogonalize: x has shape {x.shape}, but a matrix has rank 2, a stack of matrices more. "
            "Reshape it, or give a "
            "view= that says which axes form the matrix."
        )
    if view is None:
        return orthogonalizer.apply(x).astype(x.dtype)
    view = view.resolve(x.shape, "x")
    matrices = tuple(orthogonalizer.apply(matrix) for matrix in to_matrices(x, view))
    return from_matrices(matrices, view, x.shape).astype(x.dtype)
