import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_muon.orthogonalization._symmetric_matmul import Products

HIGHEST = jax.lax.Precision.HIGHEST


@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 2, 7, 12, 13])
@pytest.mark.parametrize("batch", [(), (3,), (2, 2)])
def test_blocked_is_the_full_product(blocks, size, batch, rng):
    products = Products(jnp.dtype(jnp.float32), HIGHEST, blocks)
    x = rng.normal(size=(*batch, size, 2 * size + 1)).astype(np.float32)
    gram = np.asarray(products.gram(jnp.asarray(x)))
    np.testing.assert_allclose(gram, x @ x.swapaxes(-1, -2), rtol=0, atol=1e-5)  # measured 2e-6
    square = np.asarray(products.symmetric(jnp.asarray(gram), jnp.asarray(gram)))
    np.testing.assert_allclose(square, gram @ gram, rtol=0, atol=1e-5 * abs(square).max())  # measured 3e-7


@pytest.mark.parametrize("blocks", [2, 3])
def test_blocked_is_the_full_product_under_vmap(blocks, rng):
    x = jnp.asarray(rng.normal(size=(3, 9, 14)), jnp.float32)
    blocked = Products(jnp.dtype(jnp.float32), HIGHEST, blocks).gram
    np.testing.assert_allclose(jax.vmap(blocked)(x), blocked(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("blocks", "share"), [(1, 1), (2, 3 / 4), (3, 2 / 3), (4, 5 / 8)])
def test_share_of_the_arithmetic(blocks, share):
    n = 240
    products = Products(jnp.dtype(jnp.float32), HIGHEST, blocks)
    compiled = jax.jit(products.gram).lower(jax.ShapeDtypeStruct((n, 4 * n), jnp.float32)).compile()
    assert compiled.cost_analysis()["flops"] == pytest.approx(share * 8 * n**3, rel=0.01)


# jax #7010: float32 products silently ran in bfloat16.
@pytest.mark.parametrize("setting", ["bfloat16", "tensorfloat32", None])
def test_precision_is_stated_and_no_global_flag_changes_it(setting):
    products = Products(jnp.dtype(jnp.float32), HIGHEST)
    with jax.default_matmul_precision(setting):
        text = str(jax.make_jaxpr(products.gram)(jnp.zeros((4, 6), jnp.float32)))
    assert "HIGHEST" in text
    assert "preferred_element_type=float32" in text


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_inputs_accumulate_in_float32(dtype):
    products = Products(jnp.dtype(dtype), HIGHEST)
    x = jnp.ones((1, 5000), jnp.float32)
    assert products.gram(x) == 5000  # in bfloat16 the sum would stop at 256
    text = str(jax.make_jaxpr(products.gram)(x))
    assert "preferred_element_type=float32" in text
