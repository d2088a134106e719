"""Cautious decay: the entries, the schedule, the mask, the dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_muon import add_cautious_decayed_weights


def step(transformation, updates, params):
    return transformation.update(updates, transformation.init(params), params)[0]


def test_decays_only_where_update_and_weight_agree():
    updates = jnp.array([1.0, -1.0, 1.0, -1.0, 0.0, 0.0, 1.0])
    weights = jnp.array([2.0, 2.0, -2.0, -2.0, 2.0, -2.0, 0.0])
    got = step(add_cautious_decayed_weights(0.25), updates, weights)
    np.testing.assert_array_equal(got, [1.5, -1.0, 1.0, -1.5, 0.5, -0.5, 1.0])


def test_signs_decide_where_products_would_underflow():
    tiny = jnp.array([1e-30, -1e-30])
    weights = jnp.array([-1e-30, -1e-30])
    got = step(add_cautious_decayed_weights(1.0), tiny, weights)
    np.testing.assert_allclose(got, [1e-30, -2e-30], rtol=1e-6)


def test_every_weight_with_zero_gradients_is_plain_decay():  # exact geometric decay
    weights = {"a": jnp.array([1.0, -3.0]), "b": jnp.array([[2.0]])}
    zero = jax.tree.map(jnp.zeros_like, weights)
    plain = step(optax.add_decayed_weights(0.125), zero, weights)
    got = step(add_cautious_decayed_weights(0.125), zero, weights)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(a, b)


def test_schedule_starts_at_step_zero():  # dion #108
    transformation = add_cautious_decayed_weights(lambda t: 0.1 * (t + 1))
    weights, zero = jnp.array([1.0]), jnp.array([0.0])
    state = transformation.init(weights)
    for t in range(3):
        got, state = jax.jit(transformation.update)(zero, state, weights)
        np.testing.assert_allclose(got, 0.1 * (t + 1), rtol=1e-6)
    assert state.count == 3


def test_mask_and_extra_arguments():
    weights = {"kernel": jnp.ones(2), "bias": jnp.ones(2)}
    transformation = add_cautious_decayed_weights(0.5, mask={"kernel": True, "bias": False})
    zero = jax.tree.map(jnp.zeros_like, weights)
    got, _ = transformation.update(zero, transformation.init(weights), weights, value=1.0)
    np.testing.assert_array_equal(got["kernel"], [0.5, 0.5])
    np.testing.assert_array_equal(got["bias"], [0.0, 0.0])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("decay", [0.1, np.float64(0.1), jnp.float32(0.1), lambda t: jnp.float32(0.1)])
def test_dtypes_stay(dtype, decay):  # optax #1405
    weights = jnp.ones((2, 3), dtype)
    got = step(add_cautious_decayed_weights(decay), jnp.zeros_like(weights), weights)
    assert got.dtype == dtype


def test_errors():
    with pytest.raises(ValueError, match="weight_decay must be finite and not negative"):
        add_cautious_decayed_weights(-0.1)
    with pytest.raises(ValueError, match="needs them: call update"):
        add_cautious_decayed_weights(0.1).update(jnp.ones(2), optax.EmptyState())
