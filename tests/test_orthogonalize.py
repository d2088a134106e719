import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_muon._orthogonalize import orthogonalize
from optax_muon.orthogonalization import Orthogonalizer
from optax_muon.parameters import MatrixView, contiguous_blocks
from tests import reference as ref


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_keeps_shape_and_dtype(dtype, rng):
    x = jnp.asarray(rng.normal(size=(2, 6, 9)), dtype)
    ours = orthogonalize(x)
    assert ours.dtype == dtype
    exact = np.stack([ref.newton_schulz(np.asarray(m, np.float64)) for m in x])
    np.testing.assert_allclose(
        np.asarray(ours, np.float64), exact, atol=4 * float(jnp.finfo(dtype).eps) + 1e-5
    )


def test_a_view_says_what_the_matrix_is(rng):
    kernel = jnp.asarray(rng.normal(size=(6, 3, 4)), jnp.float32)  # (embed, heads, head)
    view = MatrixView(reduction_axes=(0,), output_axes=(1, 2))
    expected = ref.newton_schulz(np.asarray(kernel).reshape(6, 12)).reshape(6, 3, 4)
    np.testing.assert_allclose(orthogonalize(kernel, view=view), expected, atol=2e-5)
    per_head = orthogonalize(kernel, Orthogonalizer("svd"), view=MatrixView(0, 2))
    for head in range(3):
        np.testing.assert_allclose(per_head[:, head], ref.polar_factor(kernel[:, head]), atol=2e-5)


def test_blocks_are_matrices_of_their_own(rng):
    fused = jnp.asarray(rng.normal(size=(8, 12)), jnp.float32)
    ours = orthogonalize(fused, view=MatrixView(0, 1, contiguous_blocks(1, (8, 2, 2))))
    for start, stop in [(0, 8), (8, 10), (10, 12)]:
        np.testing.assert_allclose(ours[:, start:stop], orthogonalize(fused[:, start:stop]), atol=2e-5)


def test_numpy_and_jit_are_fine(rng):
    x = rng.normal(size=(4, 7)).astype(np.float32)
    np.testing.assert_allclose(jax.jit(orthogonalize)(x), orthogonalize(x), atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.int32, jnp.bool_])
def test_refuses_what_is_not_real_and_floating(dtype):
    with pytest.raises(TypeError, match="x has dtype"):
        orthogonalize(jnp.ones((3, 4), dtype))


@pytest.mark.parametrize("shape", [(), (5,)])
def test_refuses_what_is_no_matrix(shape):
    with pytest.raises(ValueError, match="rank 2"):
        orthogonalize(jnp.ones(shape))


def test_refuses_another_orthogonalizer():
    with pytest.raises(TypeError, match="orthogonalizer"):
        orthogonalize(jnp.ones((2, 2)), "svd")


def test_refuses_a_view_that_does_not_fit():
    with pytest.raises(ValueError, match="x"):
        orthogonalize(jnp.ones((2, 2)), view=MatrixView(0, 3))
