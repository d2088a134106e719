"""Momentum forms and the properties of whole trajectories."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_muon import MatrixView, Orthogonalizer, Rule, muon, scale_by_muon

EXACT = Orthogonalizer(method="svd")


def normal(shape, seed):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def orthogonal(n, seed):
    return jnp.linalg.qr(normal((n, n), seed))[0]


@pytest.mark.parametrize("nesterov", ["torch", None])
def test_ema_equals_sum_momentum_for_constant_momentum(nesterov):
    """Both forms differ by the factor 1 - b, which the normalisation removes."""
    b, total = 0.95, jnp.zeros((12, 20))
    params = {"kernel": jnp.zeros((12, 20))}
    tx = scale_by_muon(momentum=b, nesterov=nesterov)
    state = tx.init(params)
    for t in range(4):
        g = normal((12, 20), t)
        updates, state = tx.update({"kernel": g}, state, params)
        total = b * total + g
        u = total if nesterov is None else g + b * total
        expected = Orthogonalizer().apply(u)
        # measured 2e-7; bound 1e-5
        np.testing.assert_allclose(updates["kernel"], expected, atol=1e-5)
        np.testing.assert_allclose(state.mu["kernel"], (1 - b) * total, atol=1e-6)


def test_without_polynomial_it_is_momentum_over_its_norm():
    """One step of the map s -> s orthogonalises nothing: what is left is SGD with momentum, normalised."""
    tx = scale_by_muon(orthogonalizer=Orthogonalizer(coefficients=((1.0, 0.0, 0.0),)))
    trace = optax.trace(0.95, nesterov=True)
    params = {"kernel": jnp.zeros((6, 9))}
    state, plain = tx.init(params), trace.init(params)
    for t in range(4):
        gradient = {"kernel": normal((6, 9), t)}
        updates, state = tx.update(gradient, state, params)
        expected, plain = trace.update(gradient, plain)
        direction = expected["kernel"] / jnp.linalg.norm(expected["kernel"])
        np.testing.assert_allclose(updates["kernel"], direction, atol=1e-6)  # measured 6e-8


@pytest.mark.parametrize("orthogonalizer", [EXACT, Orthogonalizer()], ids=["exact", "newton_schulz"])
def test_trajectories_rotate_with_the_weights(orthogonalizer):
    """Training f(W) from W and f(P^T W Q^T) from P W Q gives trajectories that are each other's rotation."""
    p, q, target = orthogonal(8, 1), orthogonal(12, 2), normal((8, 12), 3)
    x = normal((16, 8), 4)

    def loss(w):
        return jnp.mean((jnp.tanh(x @ w) - x @ target) ** 2)

    def train(w, f):
        tx = muon(0.05, orthogonalizer=orthogonalizer, adamw_learning_rate=None)
        params = {"kernel": w}
        state = tx.init(params)
        step = jax.jit(lambda g, s, p: tx.update(g, s, p))
        for _ in range(5):
            updates, state = step(jax.grad(lambda t: f(t["kernel"]))(params), state, params)
            params = optax.apply_updates(params, updates)
        return params["kernel"]

    start = normal((8, 12), 5)
    plain = train(start, loss)
    rotated = train(p @ start @ q, lambda w: loss(p.T @ w @ q.T))
    assert float(jnp.abs(plain - start).max()) > 0.05
    np.testing.assert_allclose(rotated, p @ plain @ q, atol=2e-4)  # measured 6e-6 (exact), 2e-5 (five steps)


def test_zero_gradient_and_momentum_decay_geometrically():
    params = {"kernel": normal((8, 32), 0)}
    tx = muon(0.5, weight_decay=0.25)
    state, p, expected = tx.init(params), params, params["kernel"]
    for _ in range(3):
        updates, state = tx.update({"kernel": jnp.zeros((8, 32))}, state, p)
        p = optax.apply_updates(p, updates)
        expected = 0.875 * expected  # a power of two in the decay: exact
    np.testing.assert_array_equal(p["kernel"], expected)


def test_stacks_are_orthogonalised_one_by_one():
    g = normal((3, 8, 12), 0) * jnp.asarray([1.0, 1e3, 1e-3])[:, None, None]  # marin #8621
    tx = scale_by_muon(rules=[Rule(".*", MatrixView(1, 2))])
    updates, _ = tx.update({"w": g}, tx.init({"w": g}), {"w": g})
    single = scale_by_muon()
    for i in range(3):
        alone, _ = single.update({"kernel": g[i]}, single.init({"kernel": g[i]}), {"kernel": g[i]})
        np.testing.assert_allclose(updates["w"][i], alone["kernel"], atol=1e-6)  # measured 1e-7
        s = np.linalg.svd(updates["w"][i], compute_uv=False)
        assert s.min() > 0.5
        assert s.max() < 1.25
