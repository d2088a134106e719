"""The wrapper of `muon`: two halves, decided once, dtypes and structures kept, clear errors."""

import re
import subprocess
import sys
import warnings

import chex
import equinox as eqx
import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_muon
from optax_muon import MatrixView, Rule, contiguous_blocks, muon, scale_by_muon, scale_by_shape, shape_factors


def normal(shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def step(tx, params, gradients):
    return tx.update(gradients, tx.init(params), params)[0]


def tree(seed=0):
    return {
        "hidden": {"kernel": normal((8, 16), seed), "bias": normal((16,), seed + 1)},
        "embed": {"embedding": normal((32, 8), seed + 2)},
        "norm": {"scale": normal((8,), seed + 3)},
    }


def singular_values(x):
    return np.linalg.svd(np.asarray(x, np.float64), compute_uv=False)


def assert_orthogonal(update, scale):
    """Muon ran: singular values in Keller's band (0.68 to 1.14 for these well-conditioned gradients)."""
    s = singular_values(update) / scale
    assert s.min() > 0.6, s
    assert s.max() < 1.25, s


# --- the two halves


def test_matrices_take_muon_and_the_rest_is_adamw_exactly():  # Moonlight #23, OLMo-core #854
    params, gradients = tree(), tree(10)
    tx = muon(1e-2, adamw_b1=0.8, adamw_b2=0.99, adamw_eps=1e-6)
    # Optax's own adamw differs by an ulp between trees (it compiles its bias correction per tree).
    rest = lambda t: t | {"hidden": {"bias": t["hidden"]["bias"]}}
    decayed = {"hidden": {"bias": False}, "embed": {"embedding": True}, "norm": {"scale": False}}
    adamw = optax.adamw(1e-2, b1=0.8, b2=0.99, eps=1e-6, weight_decay=0.1, mask=decayed)
    state, plain, p, q = tx.init(params), adamw.init(rest(params)), params, rest(params)
    for seed in range(10):
        gradients = tree(10 + seed)
        updates, state = tx.update(gradients, state, p)
        expected, plain = adamw.update(rest(gradients), plain, q)
        chex.assert_trees_all_equal(rest(updates), expected)
        p, q = optax.apply_updates(p, updates), optax.apply_updates(q, expected)
    decay = -1e-2 * 0.1 * p["hidden"]["kernel"]
    last = updates["hidden"]["kernel"]
    assert_orthogonal(last - decay, 1e-2 * 0.2 * 4)


def test_each_half_has_its_own_rate_and_decay():  # optax #1565, levanter #1147, keras #21856, SpeCo #91
    params = tree()
    zero = jax.tree.map(jnp.zeros_like, params)
    updates = step(muon(1.0, weight_decay=0.1, adamw_weight_decay=0.0), params, zero)
    chex.assert_trees_all_close(updates["hidden"]["kernel"], -0.1 * params["hidden"]["kernel"], rtol=1e-6)
    assert not jnp.any(updates["embed"]["embedding"])
    updates = step(muon(1.0, weight_decay=0.0, adamw_weight_decay=0.1), params, zero)
    assert not jnp.any(updates["hidden"]["kernel"])
    chex.assert_trees_all_close(updates["embed"]["embedding"], -0.1 * params["embed"]["embedding"], rtol=1e-6)
    updates = step(muon(0.5, adamw_learning_rate=0.0), params, tree(5))
    assert not jnp.any(updates["embed"]["embedding"])
    assert jnp.any(updates["hidden"]["kernel"])
    updates = step(muon(0.0, adamw_learning_rate=0.5), params, tree(5))
    assert jnp.any(updates["embed"]["embedding"])
    assert not jnp.any(updates["hidden"]["kernel"])
    # Each step is in proportion to its own rate and knows nothing of the other, numbers and schedules alike.
    rates = [(1e-2, 1e-3), (1e-2, 4e-3), (lambda t: 3e-2 / (t + 1), lambda t: 1e-3 * (t + 1))]
    one, faster, scheduled = (step(muon(m, adamw_learning_rate=a), params, tree(5)) for m, a in rates)
    for updates, of_muon, of_adamw in ((faster, 1, 4), (scheduled, 3, 1)):
        times = {"hidden": {"kernel": of_muon, "bias": of_adamw}, "embed": {"embedding": of_adamw}}
        scaled = jax.tree.map(jnp.multiply, one, times | {"norm": {"scale": of_adamw}})
        chex.assert_trees_all_close(updates, scaled, rtol=1e-5)  # measured 1.2e-7


def test_schedules_start_at_step_zero_and_reach_both_halves():  # sparsify #62, optax #415, dion #108
    params, gradients = tree(), tree(3)
    tx = muon(lambda t: 0.1 * t, weight_decay=lambda t: 0.1 * (t + 1))
    updates, state = tx.update(gradients, tx.init(params), params)
    assert all(not jnp.any(u) for u in jax.tree.leaves(updates))
    zero = jax.tree.map(jnp.zeros_like, params)
    tx = muon(1.0, weight_decay=lambda t: 0.1 * (t + 1))
    state = tx.init(params)
    for t in range(3):
        updates, state = jax.jit(tx.update)(zero, state, params)
        for leaf in (("hidden", "kernel"), ("embed", "embedding")):
            # measured 1e-7 relative
            np.testing.assert_allclose(
                updates[leaf[0]][leaf[1]], -0.1 * (t + 1) * params[leaf[0]][leaf[1]], rtol=1e-6
            )


def test_decay_is_exact_and_never_scaled_by_shape():  # tinygrad #17709, Moonlight #40
    params = {"a": {"kernel": normal((64, 64))}, "b": {"kernel": normal((16, 256))}}
    zero = jax.tree.map(jnp.zeros_like, params)
    for update in (step, jax.jit(step, static_argnums=0)):
        moved = optax.apply_updates(params, update(muon(1.0, weight_decay=0.125), params, zero))
        chex.assert_trees_all_equal(moved, jax.tree.map(lambda p: 0.875 * p, params))
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    cut = jax.device_put(params, NamedSharding(mesh, P("data", "model")))
    zero = jax.tree.map(jnp.zeros_like, cut)
    moved = optax.apply_updates(
        cut, jax.jit(step, static_argnums=0)(muon(1.0, weight_decay=0.125), cut, zero)
    )
    chex.assert_trees_all_equal(jax.device_get(moved), jax.tree.map(lambda p: np.asarray(0.875 * p), params))


def test_norms_and_biases_are_not_decayed_by_default():
    params = tree()
    updates = step(muon(1.0), params, jax.tree.map(jnp.zeros_like, params))
    assert not jnp.any(updates["hidden"]["bias"])
    assert not jnp.any(updates["norm"]["scale"])
    assert jnp.any(updates["embed"]["embedding"])
    assert jnp.any(updates["hidden"]["kernel"])
    everything = step(muon(1.0, weight_decay_mask=None), params, jax.tree.map(jnp.zeros_like, params))
    assert all(jnp.any(u) for u in jax.tree.leaves(everything))


@pytest.mark.parametrize("container", [dict, flax.core.freeze], ids=["dict", "frozen"])
def test_masks_match_by_path_in_any_container(container):  # optax #160, #1007
    params = tree()
    mask = container(
        {
            "hidden": {"kernel": False, "bias": True},
            "embed": {"embedding": False},
            "norm": {"scale": True},
        }
    )
    updates = step(muon(1.0, weight_decay_mask=mask), params, jax.tree.map(jnp.zeros_like, params))
    assert not jnp.any(updates["hidden"]["kernel"])
    assert jnp.any(updates["hidden"]["bias"])


def test_momentum_may_follow_a_schedule():
    params = {"dense": {"kernel": normal((8, 8))}}
    warm_up = optax.linear_schedule(0.85, 0.95, 2)
    tx, state = scale_by_muon(momentum=warm_up), scale_by_muon().init(params)
    mu = jnp.zeros((8, 8))
    for t, b in enumerate((0.85, 0.90, 0.95, 0.95)):
        gradients = {"dense": {"kernel": normal((8, 8), t)}}
        _, state = tx.update(gradients, state, params)
        mu = b * mu + (1 - b) * gradients["dense"]["kernel"]
        chex.assert_trees_all_close(state.mu["dense"]["kernel"], mu, rtol=1e-5, atol=1e-7)  # measured 2e-7
    assert state.count == 4


def test_the_momentum_is_orthogonalised_not_the_gradient():  # optax #1170
    params = {"dense": {"kernel": normal((8, 16))}}
    first, second = ({"dense": {"kernel": normal((8, 16), s)}} for s in (1, 2))
    for momentum, same in ((0.95, False), (0.0, True)):
        tx = scale_by_muon(momentum=momentum)
        _, state = tx.update(first, tx.init(params), params)
        carried, _ = tx.update(second, state, params)
        fresh = step(tx, params, second)
        assert np.allclose(carried["dense"]["kernel"], fresh["dense"]["kernel"], atol=1e-5) is same


def test_labels_and_transformations_of_the_users_own():
    params, gradients = tree(), tree(4)
    tx = muon(
        1e-2,
        transforms={"sgd": optax.sgd(0.5)},
        rules=[Rule("norm/.*", "sgd"), Rule("embed/.*", "frozen")],
    )
    state = tx.init(params)
    updates, _ = tx.update(gradients, state, params)
    chex.assert_trees_all_close(updates["norm"]["scale"], -0.5 * gradients["norm"]["scale"])
    assert not jnp.any(updates["embed"]["embedding"])  # optax #159, #477
    assert_orthogonal(updates["hidden"]["kernel"] + 1e-3 * params["hidden"]["kernel"], 1e-2 * 0.2 * 4)
    kept = sum(x.size for x in jax.tree.leaves(state))
    assert kept < params["embed"]["embedding"].size  # frozen leaves hold no state (optax #993)
    with pytest.raises(ValueError, match=r"`norm/scale` has the label 'sgd'"):
        muon(1e-2, rules=[Rule("norm/.*", "sgd")]).init(params)


def test_a_chain_of_ones_own_may_replace_muons():
    params, gradients = tree(), tree(4)
    chain = optax.chain(scale_by_muon(), scale_by_shape(shape_factors.sqrt_ratio()), optax.scale(-1.0))
    updates = step(muon(1e-2, transforms={"muon": chain}), params, gradients)
    assert_orthogonal(updates["hidden"]["kernel"], np.sqrt(2))
    default = step(muon(1e-2), params, gradients)
    chex.assert_trees_all_equal(updates["embed"], default["embed"])


# --- views: what a matrix is does not depend on how it is stored


def test_scanned_equals_unscanned_leaf_by_leaf():  # marin #8621
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dense(8, name="down")(nn.relu(nn.Dense(32, name="up")(x))), None

    def scan(axis):
        return nn.scan(Block, variable_axes={"params": axis}, split_rngs={"params": True}, length=3)()

    for axis in (0, 1):
        params = scan(axis).init(jax.random.key(0), jnp.ones((2, 8)), None)["params"]
        rules = (
            None
            if axis == 0
            else [
                Rule(".*/kernel", MatrixView(0, 2)),
                Rule(".*/bias", None),
            ]
        )
        gradients = jax.tree.map(lambda p: normal(p.shape, p.size), params)
        updates = step(muon(1e-2, rules=rules), params, gradients)
        for layer in range(3):
            one = lambda t, i=layer, a=axis: jax.tree.map(
                lambda x: jnp.take(x, i, axis=min(a, x.ndim - 1)), t
            )
            alone = step(muon(1e-2), {"block": one(params)}, {"block": one(gradients)})
            # measured 3e-8; bound 1e-6
            chex.assert_trees_all_close(one(updates), alone["block"], atol=1e-6)
            assert_orthogonal(
                one(updates)["up"]["kernel"] + 1e-3 * one(params)["up"]["kernel"], 1e-2 * 0.2 * 32**0.5
            )


def test_attention_kernel_equals_its_flat_dense():  # Muon #34
    heads = {"attention": {"query": {"kernel": normal((16, 4, 8))}, "out": {"kernel": normal((4, 8, 16))}}}
    flat = {"a": {"kernel": normal((16, 32))}, "b": {"kernel": normal((32, 16))}}
    updates, plain = step(muon(1e-2), heads, heads), step(muon(1e-2), flat, flat)
    query = updates["attention"]["query"]["kernel"].reshape(16, 32)
    out = updates["attention"]["out"]["kernel"].reshape(32, 16)
    chex.assert_trees_all_close(
        query,
        step(
            muon(1e-2),
            {"k": {"kernel": normal((16, 4, 8)).reshape(16, 32)}},
            {"k": {"kernel": normal((16, 4, 8)).reshape(16, 32)}},
        )["k"]["kernel"],
        atol=1e-7,
    )
    assert out.shape == plain["b"]["kernel"].shape
    assert_orthogonal(
        query + 1e-3 * heads["attention"]["query"]["kernel"].reshape(16, 32), 1e-2 * 0.2 * 32**0.5
    )


@pytest.mark.parametrize("sizes", [(16, 16, 16), (16, 4, 4)])
def test_fused_qkv_with_blocks_equals_three_denses(sizes):  # dion #90, Megatron-LM #4731, #7077, xtuner #2030
    fused = normal((16, sum(sizes)))
    parts = jnp.split(fused, np.cumsum(sizes)[:-1], axis=1)
    rule = Rule(".*/kernel", MatrixView(0, 1, contiguous_blocks(1, sizes)))
    together = step(muon(1e-2, rules=[rule]), {"qkv": {"kernel": fused}}, {"qkv": {"kernel": fused}})
    params = {f"part{i}": {"kernel": x} for i, x in enumerate(parts)}
    apart = step(muon(1e-2), params, params)
    joined = jnp.concatenate([apart[f"part{i}"]["kernel"] for i in range(3)], axis=1)
    chex.assert_trees_all_close(together["qkv"]["kernel"], joined, atol=1e-7)  # measured 2e-9
    assert_orthogonal(apart["part0"]["kernel"] + 1e-3 * parts[0], 1e-2 * 0.2 * 4)


@pytest.mark.parametrize("shape", [(64, 64), (64, 512), (512, 64), (256, 128), (3, 3, 16, 64)])
def test_update_rms_carries_an_adamw_rate_over(shape):  # Muon #49, pytorch_optimizer #371
    params = {"conv" if len(shape) == 4 else "dense": {"kernel": jnp.zeros(shape)}}
    gradients = jax.tree.map(lambda p: normal(p.shape), params)
    tx = muon(1.0, orthogonalizer=optax_muon.Orthogonalizer(coefficients=optax_muon.DEEPSEEK_V4))
    (update,) = jax.tree.leaves(step(tx, params, gradients))
    rms = float(jnp.sqrt(jnp.mean(update**2)))
    assert abs(rms / 0.2 - 1) < 0.1, rms  # measured within 2 %
    (keller,) = jax.tree.leaves(step(muon(1.0), params, gradients))
    assert 0.68 < float(jnp.sqrt(jnp.mean(keller**2))) / 0.2 < 1.14  # Keller's map never reaches 1


# --- structure, metadata, types


def test_nnx_optimizer_trains_whatever_metadata_update_strips():  # flax #4901, #5372, optax #1148
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.attention = nnx.MultiHeadAttention(4, 16, rngs=rngs, decode=False)
            self.norm = nnx.LayerNorm(16, rngs=rngs)
            self.head = nnx.Linear(16, 3, rngs=rngs)

        def __call__(self, x):
            return self.head(self.norm(self.attention(x)))

    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, muon(1e-2), wrt=nnx.Param)
    x = normal((2, 5, 16))

    @nnx.jit
    def train(model, optimizer):
        loss, gradients = nnx.value_and_grad(lambda m: jnp.mean((m(x) - 1) ** 2))(model)
        optimizer.update(model, gradients)
        return loss

    before = nnx.state(model, nnx.Param)
    kernel = np.asarray(model.attention.query.kernel[...])
    losses = [float(train(model, optimizer)) for _ in range(5)]
    assert losses[-1] < losses[0]
    labels = optax_muon.param_labels(before)
    assert jax.tree.leaves(labels).count("muon") == 4
    moved = np.asarray(model.attention.query.kernel[...]) - kernel
    assert np.linalg.matrix_rank(moved.reshape(16, 16)) == 16


def test_equinox_module_is_trained():  # equinox #364
    model = eqx.nn.MLP(4, 3, 16, 2, key=jax.random.key(0))
    params = eqx.filter(model, eqx.is_inexact_array)
    gradients = jax.tree.map(lambda p: normal(p.shape), params)
    updates = step(muon(1e-2), params, gradients)
    assert_orthogonal(updates.layers[1].weight + 1e-3 * model.layers[1].weight, 1e-2 * 0.2 * 4)
    assert updates.layers[1].weight.shape == (16, 16)


def test_label_trees_of_any_kind():  # keras #21079, optax #1109, #913, equinox #193, ReaLLM-Forge #836
    params, gradients = tree(), tree(4)
    with pytest.warns(UserWarning, match="No leaf gets Muon"):
        expected = step(muon(1e-2, rules=[Rule("hidden/kernel", None)]), params, gradients)
    seen = []

    def callable_labels(p):
        seen.append(p)
        return {"hidden": {"kernel": "adamw", "bias": "adamw"}, "embed": "adamw", "norm": "adamw"}

    for labels in (
        {"hidden": "adamw", "embed": "adamw", "norm": "adamw"},
        flax.core.freeze({"hidden": {"kernel": "adamw", "bias": "adamw"}, "embed": "adamw", "norm": "adamw"}),
        callable_labels,
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the same warning, which comes once per content
            updates = step(muon(1e-2, param_labels=labels), params, gradients)
        chex.assert_trees_all_equal(updates, expected)
    assert all(jax.tree.structure(p) == jax.tree.structure(params) for p in seen)
    prefix = step(
        muon(1e-2, param_labels={"hidden": "muon", "embed": "adamw", "norm": "adamw"}), params, gradients
    )
    chex.assert_trees_all_equal(prefix, step(muon(1e-2), params, gradients))


def test_integer_leaves_get_zero_updates_and_no_state():  # optax #333
    params = {
        "dense": {"kernel": normal((4, 8))},
        "step": jnp.asarray(3),
        "flags": jnp.ones((4, 4), bool),
        "quantised": jnp.ones((8, 8), jnp.int8),
    }
    loss = lambda p: jnp.sum(p["dense"]["kernel"] ** 2)
    gradients = jax.grad(loss, allow_int=True)(params)
    tx = muon(1e-2)
    state = tx.init(params)
    updates, _ = jax.jit(tx.update)(gradients, state, params)
    moved = optax.apply_updates(params, updates)
    for name in ("step", "flags", "quantised"):
        chex.assert_trees_all_equal(moved[name], params[name])
        assert moved[name].dtype == params[name].dtype
    assert all(x.shape in ((), (4, 8)) for x in jax.tree.leaves(state))
    assert jnp.any(updates["dense"]["kernel"])


@pytest.mark.parametrize(
    "rate", [1e-3, np.float64(1e-3), np.float32(1e-3), jnp.bfloat16(1e-3), np.array(1e-3)]
)
def test_update_dtype_does_not_depend_on_the_type_of_the_rate(rate, x64):  # optax #1405, flax #924
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree())
    for lr in (rate, lambda t: rate):
        tx = muon(lr)
        state = tx.init(params)
        updates, after = tx.update(tree(1), state, params)
        chex.assert_trees_all_equal_dtypes(updates, params)
        chex.assert_trees_all_equal_dtypes(state, after)


def test_equal_arguments_make_equal_optimizers():  # optax #353, #197
    traces = []

    def f(tx, params):
        traces.append(1)
        return step(tx, params, params)

    for _ in range(3):
        updates = jax.jit(f, static_argnums=0)(muon(1e-2), tree())
    assert len(traces) == 1
    assert_orthogonal(updates["hidden"]["kernel"] + 1e-3 * tree()["hidden"]["kernel"], 1e-2 * 0.2 * 4)
    assert muon(1e-2) != muon(2e-2)
    assert muon(1e-2, rules=[]) == muon(1e-2, rules=[])


def test_several_models_at_once_under_vmap():  # optax #932
    params, gradients = tree(), tree(4)
    rates = jnp.array([1e-3, 1e-2, 1e-1])
    together = jax.vmap(lambda lr: step(muon(lr), params, gradients))(rates)
    for i, rate in enumerate([1e-3, 1e-2, 1e-1]):
        alone = step(muon(rate), params, gradients)
        # measured 1e-6 relative; bound 1e-5
        chex.assert_trees_all_close(jax.tree.map(lambda x, i=i: x[i], together), alone, rtol=1e-4, atol=1e-7)


def test_several_models_are_trained_in_one_scan_under_vmap():  # optax #932
    models = jax.tree.map(lambda *x: jnp.stack(x), *(tree(i) for i in range(3)))
    gradients = jax.tree.map(lambda *x: jnp.stack(x), *(tree(10 + t) for t in range(4)))
    rates = jnp.array([1e-3, 1e-2, 1e-1])

    def train(params, rate):
        tx = muon(rate)

        def body(carry, g):
            params, state = carry
            updates, state = tx.update(g, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(body, (params, tx.init(params)), gradients)[0][0]

    together = jax.jit(jax.vmap(train))(models, rates)
    for i, rate in enumerate(rates):
        alone = jax.jit(train)(tree(i), rate)
        # measured 2.4e-7, weights of order 1; bound 1e-5
        chex.assert_trees_all_close(jax.tree.map(lambda x, i=i: x[i], together), alone, rtol=1e-5, atol=1e-5)


def test_construction_makes_no_arrays_and_leaks_no_tracer():  # optax #1186
    holder = {}

    def build(params):
        holder["tx"] = muon(1e-2)
        return holder["tx"].init(params)

    with jax.checking_leaks():
        jax.eval_shape(build, tree())
        updates = jax.jit(lambda p, g: step(holder["tx"], p, g))(tree(), tree(1))
    assert jnp.any(updates["hidden"]["kernel"])


def test_two_rates_share_one_program():  # optax #577
    tx = optax.inject_hyperparams(muon)(1e-3)
    params = tree()
    state = tx.init(params)
    update = jax.jit(tx.update)
    update(params, state, params)
    state.hyperparams["learning_rate"] = jnp.asarray(2e-3, jnp.float32)
    update(params, state, params)
    assert update._cache_size() == 1


def test_one_iteration_per_shape_in_the_compiled_program():  # google-research #2270, pytorch #195566
    def bodies(layers):
        params = {
            f"layer{i}": {"kernel": jnp.ones((16, 24)), "out": {"kernel": jnp.ones((24, 16))}}
            for i in range(layers)
        }
        tx = muon(1e-2)
        text = jax.jit(tx.update).lower(params, tx.init(params), params).compile().as_text()
        return len(re.findall(r"\bdot\(|custom-call\(.*matmul", text))

    assert bodies(2) == bodies(12) > 0


# --- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"learning_rate": -1.0}, "learning_rate must be finite and not negative, got -1.0"),
        ({"learning_rate": "fast"}, "learning_rate must be a number or a schedule"),
        ({"weight_decay": -0.1}, "weight_decay must be finite"),
        ({"weight_decay": float("nan")}, "weight_decay must be finite"),
        ({"momentum": 1.0}, r"momentum must lie in \[0, 1\)"),
        ({"momentum": -0.1}, r"momentum must lie in \[0, 1\)"),
        ({"adamw_b2": 1.5}, "adamw_b2 must lie"),
        ({"adamw_eps": -1e-8}, "adamw_eps must be finite"),
        ({"adamw_learning_rate": -1.0}, "adamw_learning_rate must be finite"),
        ({"nesterov": True}, "nesterov must be one of 'torch', 'optax', None, got True"),
        ({"orthogonalizer": "svd"}, "orthogonalizer must be an optax_muon.Orthogonalizer"),
        ({"shape_factor": 0.2}, "shape_factor must be a value of optax_muon.shape_factors"),
        ({"weight_decay_mask": "none"}, "weight_decay_mask must be one of"),
        ({"mu_dtype": jnp.int32}, "mu_dtype must be a floating dtype"),
        ({"mu_dtype": "float33"}, "mu_dtype must be a floating dtype"),
        ({"wire_dtype": jnp.float16}, "wire_dtype cannot be float16"),
        ({"mesh_axes": "data"}, "mesh_axes must be a sequence"),
        ({"rules": [("a", None)]}, "rules must be a sequence of optax_muon.Rule"),
    ],
)
def test_bad_arguments_are_named_at_construction(arguments, message):
    arguments = {"learning_rate": 1e-2} | arguments
    with pytest.raises((ValueError, TypeError), match=message):
        muon(arguments.pop("learning_rate"), **arguments)


def test_only_the_first_argument_is_positional():  # unsloth #5933
    with pytest.raises(TypeError):
        muon(1e-2, 3e-4)


def test_parameters_are_needed_for_decay():
    params = tree()
    tx = muon(1e-2)
    with pytest.raises(ValueError, match=r"needs them: call update\(gradients, state, params\)"):
        tx.update(params, tx.init(params))
    tx = muon(1e-2, weight_decay=0.0)
    with_params = tx.update(params, tx.init(params), params)[0]
    without = tx.update(params, tx.init(params))[0]
    chex.assert_trees_all_equal(without, with_params)


def test_gradients_that_do_not_fit_raise_with_the_path():  # equinox #681, optax #515
    params = tree()
    tx = muon(1e-2)
    state = tx.init(params)
    with pytest.raises(ValueError, match="`hidden/bias` is a parameter, but has no gradient"):
        tx.update(params | {"hidden": {"kernel": params["hidden"]["kernel"], "bias": None}}, state, params)
    with pytest.raises(ValueError, match="`extra` has a gradient, but is no parameter"):
        tx.update(params | {"extra": jnp.zeros(3)}, state, params)
    per_example = jax.tree.map(lambda p: jnp.stack([p] * 4), params)
    with pytest.raises(
        ValueError, match=r"`embed/embedding` has shape \(32, 8\), but its gradient has shape \(4, 32, 8\)"
    ):
        tx.update(per_example, state, params)
    with pytest.raises(ValueError, match="made for 4 parameters"):
        tx.update({"hidden": params["hidden"]}, state, {"hidden": params["hidden"]})


def test_a_leaf_is_never_silently_rerouted():
    params = {"block": {"w": normal((8, 8))}, "b": {"w": normal((4, 4))}}
    state = muon(1e-2, rules=[Rule("b/w", None)]).init(params)
    with pytest.raises(
        ValueError, match="`b/w` was routed to not muon when the state was made, but now to muon"
    ):
        muon(1e-2).update(params, state, params)


def test_complex_parameters_raise():  # optax #1494
    with pytest.raises((ValueError, TypeError), match="dense/kernel"):
        muon(1e-2).init({"dense": {"kernel": jnp.ones((4, 4), jnp.complex64)}})


def test_scale_by_muon_refuses_leaves_that_are_no_matrix():
    with pytest.raises(ValueError, match=r"scale_by_muon takes matrices only.*hidden/bias"):
        scale_by_muon().update(tree(), scale_by_muon().init(tree()), tree())


def test_zero_size_leaves():
    params = {"dense": {"kernel": jnp.zeros((0, 8))}, "hidden": {"kernel": normal((8, 8))}}
    updates = step(muon(1e-2), params, params)
    chex.assert_trees_all_equal_shapes(updates, params)
    assert jnp.any(updates["hidden"]["kernel"])


def test_adamw_arguments_without_an_adamw_leaf_warn():  # joliGEN #809
    with pytest.warns(UserWarning, match="adamw_learning_rate"):
        muon(1e-2, adamw_learning_rate=1e-3).init({"dense": {"kernel": normal((8, 8))}})


def test_import_pulls_in_no_framework():
    code = (
        "import optax_muon, sys; "
        "print([m for m in ('flax', 'equinox', 'orbax', 'torch', 'matplotlib') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
