"""Containers, masks, frameworks: faults of other packages, as what must hold here."""

import typing

import chex
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from optax_muon import Rule, accumulate_gradients, muon


def normal(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def tree():
    return {"up": {"kernel": normal((4, 6)), "bias": normal((6,))}, "down": {"kernel": normal((6, 4), 1)}}


def step(tx, params, gradients):
    return tx.update(gradients, tx.init(params), params)[0]


def zeros(params):
    return jax.tree.map(jnp.zeros_like, params)


def in_band(update, factor):
    singular = np.linalg.svd(np.asarray(update, np.float64), compute_uv=False) / factor
    return 0.5 < singular.min() <= singular.max() < 1.25


def test_masks_made_of_an_nnx_state():  # google/flax #5372, #3955; google-deepmind/optax #1148
    model = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    params["bias"][...] += 1.0
    for mask in (
        jax.tree.map(lambda x: x.ndim == 1, params),
        {"kernel": False, "bias": True},
        lambda p: jax.tree.map(lambda x: x.ndim == 1, p),
    ):
        updates = step(muon(1.0, weight_decay=0.5, weight_decay_mask=mask), params, zeros(params))
        assert not jnp.any(updates["kernel"][...])
        np.testing.assert_allclose(updates["bias"][...], -0.5)
    assert in_band(step(muon(1.0, weight_decay=0.0), params, params)["kernel"][...], 0.2 * 6**0.5)


class Model(eqx.Module):
    up: typing.Any
    down: typing.Any
    activation: typing.Callable

    def __call__(self, x):
        raise AssertionError("a tree of values is data")


def test_masks_in_a_module_that_can_be_called():
    # google-deepmind/optax #913, #1007; patrick-kidger/equinox #193, #771: static fields may stay in the mask
    k = jax.random.key(0)
    model = Model(eqx.nn.Linear(4, 6, key=k), eqx.nn.Linear(6, 4, key=k), jax.nn.relu)
    params = eqx.filter(model, eqx.is_inexact_array)
    is_linear = lambda x: isinstance(x, eqx.nn.Linear)
    weights = lambda m: [x.weight for x in jax.tree.leaves(m, is_leaf=is_linear) if is_linear(x)]
    mask = eqx.tree_at(weights, jax.tree.map(lambda _: False, model), [True, True])
    assert mask.activation is False
    for given in (mask, eqx.tree_at(lambda m: m.activation, mask, None)):
        updates = step(muon(1.0, weight_decay=0.5, weight_decay_mask=given), params, zeros(params))
        np.testing.assert_allclose(updates.up.weight, -0.5 * model.up.weight, rtol=1e-6)
        assert not jnp.any(updates.up.bias)
        assert updates.activation is None
    labels = Model("adamw", "muon", "adamw")
    updates = step(muon(1.0, weight_decay=0.0, param_labels=labels), params, params)
    assert in_band(updates.down.weight, 0.2 * 6**0.5)
    np.testing.assert_allclose(abs(updates.up.weight), 1, rtol=1e-4)  # AdamW's first step


def test_frozen_leaves_cost_nothing():  # google-deepmind/optax #993
    params = {f"layer{i}": {"kernel": normal((4, 6), i)} for i in range(10)}
    tx = muon(1.0, rules=Rule("layer[1-9]/kernel", "frozen"))
    state = tx.init(params)
    assert sum(x.size for x in jax.tree.leaves(state) if x.ndim) == 24
    count = lambda tx, p: str(jax.make_jaxpr(tx.update)(p, tx.init(p), p)).count("dot_general")
    one = {"layer0": params["layer0"]}
    assert count(tx, params) == count(muon(1.0), one) > 0
    updates = tx.update(params, state, params)[0]
    assert not any(jnp.any(updates[f"layer{i}"]["kernel"]) for i in range(1, 10))


def test_label_functions_see_the_whole_tree_of_parameters():  # google-deepmind/optax #1109
    seen = []

    def labels(params):
        seen.append(params)
        return {
            "up": {"kernel": "muon", "bias": "adamw"},
            "down": "muon" if params["down"]["kernel"].ndim else None,
        }

    tx, params = muon(1e-2, param_labels=labels), tree()
    state = tx.init(params)
    chex.assert_trees_all_equal(seen, [params])
    gradients = jax.tree.map(lambda p: 0 * p + 1, params)
    update = jax.jit(tx.update)
    for _ in range(3):
        _, state = update(gradients, state, params)
        tx.update(gradients, state, params)
    assert len(seen) == 1  # the decision stands
    restored = muon(1e-2, param_labels=labels)  # another process
    for _ in range(3):
        jax.jit(restored.update)(gradients, state, params)
    assert all(p.keys() == params.keys() and p["up"].keys() == params["up"].keys() for p in seen)
    seen.clear()
    optax.masked(muon(1e-2, param_labels=labels), {"up": {"kernel": True, "bias": False}, "down": True}).init(
        params
    )
    (masked,) = seen  # an outer mask of the user's own is theirs
    assert masked["down"]["kernel"].shape == (6, 4)


def test_leaves_written_by_the_gradient_are_passed_through():  # google/paxml #48
    params = tree() | {"fp8": {"amax_history": jnp.ones(4), "kernel_scale": jnp.ones(())}}
    gradients = tree() | {"fp8": {"amax_history": jnp.full(4, 3.0), "kernel_scale": jnp.asarray(0.3)}}
    tx = muon(1e-2, rules=Rule("fp8/.*", "as is"), transforms={"as is": optax.identity()})
    state = tx.init(params)
    updates, after = tx.update(gradients, state, params)
    chex.assert_trees_all_equal(updates["fp8"], gradients["fp8"])  # no decay, momentum, matrix
    chex.assert_trees_all_equal(tx.update(gradients, after, params)[0]["fp8"], gradients["fp8"])
    assert all(x.shape in ((), (4, 6), (6, 4), (6,)) for x in jax.tree.leaves(state))
    assert in_band(updates["down"]["kernel"] + 1e-3 * params["down"]["kernel"], 1e-2 * 0.2 * 6**0.5)


def test_boxes_survive_and_the_state_has_their_names():  # google/flax #2843
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
            x = nn.Dense(8, kernel_init=init, name="up")(x)
            init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("heads", "kv", "embed"))
            return nn.DenseGeneral(4, axis=(-2, -1), kernel_init=init, name="out")(x.reshape(-1, 2, 4))

    params = Block().init(jax.random.key(0), jnp.ones((3, 4)))["params"]
    tx = muon(1e-2)
    state = jax.jit(tx.init)(params)
    updates, after = jax.jit(tx.update)(params, state, params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    specs = nn.get_partition_spec(state)
    mu = specs.inner_states["muon"].inner_state[0].mu
    wanted = nn.get_partition_spec(params)
    assert (mu["up"]["kernel"], mu["out"]["kernel"]) == (wanted["up"]["kernel"], wanted["out"]["kernel"])
    moved = updates["out"]["kernel"].unbox() + 1e-3 * params["out"]["kernel"].unbox()
    assert in_band(moved.reshape(8, 4), 1e-2 * 0.2 * 8**0.5)


def test_functions_in_the_parameters_are_named():  # patrick-kidger/equinox #590, #364
    full = tree() | {"activation": jax.nn.relu}
    arrays = tree() | {"activation": None}
    for tx in (muon(1e-2), accumulate_gradients(muon(1e-2), 2)):
        with pytest.raises(TypeError, match=r"`activation` is a .*eqx.filter"):
            tx.init(full)
        with pytest.raises((TypeError, ValueError), match="`activation`"):
            tx.update(arrays, tx.init(arrays), full)
