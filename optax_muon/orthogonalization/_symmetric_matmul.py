"""Matrix products over stacks, with the precision stated and, where the result is symmetric, about half the
work.

XLA may run a float32 product in bfloat16 on TPU or TF32 on GPU unless told otherwise, and obeys a global
flag. Here every product names its input dtype, its precision and its accumulator.
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def storage_dtype(dtype: Any) -> np.dtype:
    """`promote(float32, dtype)`, what an iterate is kept in; `jnp.promote_types` raises under strict
    promotion.
    """
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)


@dataclasses.dataclass(frozen=True)
class Products:
    """How products are computed: inputs rounded to `dtype`, accumulated and returned in float32 or wider."""

    dtype: Any
    precision: jax.lax.Precision
    blocks: int = 1

    def with_dtype(self, dtype: Any) -> "Products":
        return dataclasses.replace(self, dtype=dtype)

    def matmul(
        self, a: Float[Array, "*batch m k"], b: Float[Array, "*batch k n"]
    ) -> Float[Array, "*batch m n"]:
        """`A B`."""
        return self._dot(a, b, contract=(-1, -2))

    def gram(self, x: Float[Array, "*batch m n"]) -> Float[Array, "*batch m m"]:
        """`X Xᵀ`, without a transposed copy of X."""
        return self._symmetric(x, x, contract=(-1, -1))

    def symmetric(
        self, a: Float[Array, "*batch m m"], b: Float[Array, "*batch m m"]
    ) -> Float[Array, "*batch m m"]:
        """`A B` where the result is known to be symmetric: A and B symmetric and commuting, as polynomials of
        one matrix are.
        """
        return self._symmetric(a, b, contract=(-1, -2))

    def _symmetric(self, a: Array, b: Array, contract: tuple[int, int]) -> Array:
        """Block row by block row up to the diagonal, the rest mirrored: (k + 1) / (2 k) of the work for k
        blocks.
        """
        size = a.shape[-2]
        if self.blocks == 1 or size < 2 * self.blocks:
            return self._dot(a, b, contract)
        free = -1 if contract[1] == -2 else -2
        bounds = [size * i // self.blocks for i in range(self.blocks + 1)]
        a, b = a.astype(self.dtype), b.astype(self.dtype)
        rows = []
        for start, stop in itertools.pairwise(bounds):
            left = jax.lax.slice_in_dim(a, start, stop, axis=a.ndim - 2)
            right = jax.lax.slice_in_dim(b, 0, stop, axis=b.ndim + free)
            rows.append(self._dot(left, right, contract))
        return _mirrored(rows, bounds)

    def _dot(self, a: Array, b: Array, contract: tuple[int, int]) -> Array:
        accumulator = storage_dtype(self.dtype)
        batch = tuple(range(a.ndim - 2))
        return jax.lax.dot_general(
            a.astype(self.dtype),
            b.astype(self.dtype),
            (((a.ndim + contract[0],), (b.ndim + contract[1],)), (batch, batch)),
            # Precision chooses passes for wide inputs; narrow ones are exact in one.
            precision=self.precision if accumulator == self.dtype else jax.lax.Precision.DEFAULT,
            preferred_element_type=accumulator,
        )


def _mirrored(rows: list[Array], bounds: list[int]) -> Array:
    """The full symmetric matrix from its block rows, each of which ends with its diagonal block."""
    full = []
    for i, row in enumerate(rows):
        parts = [row]
        for below in rows[i + 1 :]:
            block = jax.lax.slice_in_dim(below, bounds[i], bounds[i + 1], axis=below.ndim - 1)
            # Alone, XLA transposes on CPU in 4 % of the time of a 768 x 768 product; fused into what follows
            # it takes 20 %.
            parts.append(jax.lax.optimization_barrier(jnp.swapaxes(block, -1, -2)))
        full.append(jnp.concatenate(parts, axis=-1))
    return jnp.concatenate(full, axis=-2)
