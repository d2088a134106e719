"""Optax's wrappers around `muon`, with Muon leaves that really take part."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_muon
from optax_muon import MatrixView, Rule, muon

RATE = 1e-2


def normal(shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def tree(seed=0, dtype=jnp.float32):
    return {
        "hidden": {"kernel": normal((8, 16), seed, dtype), "bias": normal((16,), seed + 1, dtype)},
        "embed": {"embedding": normal((32, 8), seed + 2, dtype)},
    }


def optimizer(**arguments):
    return muon(RATE, weight_decay=0.0, **arguments)


@functools.partial(jax.jit, static_argnums=0)
def run(update, gradients, state, params):
    return update(gradients, state, params)


def assert_orthogonal(update, scale=RATE * 0.2 * 4):
    """Muon ran: singular values in Keller's band; those of these gradients span more than a factor of 3."""
    s = np.linalg.svd(np.asarray(update["hidden"]["kernel"], np.float64), compute_uv=False) / scale
    assert 0.6 < s.min() <= s.max() < 1.25, s


def close(actual, expected):
    # measured 1.4e-8, steps of 8e-3: XLA orders products otherwise; bound 1e-6
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-6)


@functools.cache
def plain(seed=10, steps=1):
    """Updates of the bare optimizer after some steps with the same gradients."""
    tx, params = optimizer(), tree()
    state = tx.init(params)
    for _ in range(steps):
        updates, state = run(tx.update, tree(seed), state, params)
    return updates, state


# --- chain


def test_chained_before_and_after():  # marin #6160, transformers #614
    params, gradients = tree(), tree(10)
    big = jax.tree.map(lambda g: g, gradients) | {
        "embed": {"embedding": 1e4 * gradients["embed"]["embedding"]}
    }
    tx = optax.chain(optax.clip_by_global_norm(1.0), optimizer(), optax.scale(0.5))
    updates, state = run(tx.update, big, tx.init(params), params)
    assert_orthogonal(updates, 0.5 * RATE * 0.2 * 4)
    # One norm over all leaves: what Muon accumulated is scaled by the embedding's large gradient.
    norm = optax.tree.norm(big)
    mu = state[1].inner_states["muon"].inner_state[0].mu["hidden"]["kernel"]
    np.testing.assert_allclose(mu, 0.05 * big["hidden"]["kernel"] / norm, rtol=1e-4)
    # The scale itself plays no part in a Muon step.
    close(updates["hidden"]["kernel"], 0.5 * plain()[0]["hidden"]["kernel"])


def test_optax_wrappers_of_decay_and_rates_come_after():
    params, gradients = tree(), tree(10)
    tx = optax.chain(muon(1.0, weight_decay=0.0), optax.scale_by_schedule(lambda t: RATE * (t + 1)))
    updates, state = run(tx.update, gradients, tx.init(params), params)
    close(updates, plain()[0])
    updates, _ = run(tx.update, gradients, state, params)
    close(updates["hidden"], jax.tree.map(lambda u: 2 * u, plain(steps=2)[0]["hidden"]))


# --- inject_hyperparams


def test_injected_numbers_reach_both_halves():  # sparsify #62, tt-metal #56027, optax #964, #206, flax #4320
    params, gradients = tree(), tree(10)
    tx = optax.inject_hyperparams(muon)(RATE, weight_decay=0.0)
    state = tx.init(params)
    updates, after = run(tx.update, gradients, state, params)
    close(updates, plain()[0])
    assert_orthogonal(updates)
    np.testing.assert_allclose(after.hyperparams["learning_rate"], RATE)
    after.hyperparams["learning_rate"] = jnp.asarray(3 * RATE)
    after.hyperparams["momentum"] = jnp.asarray(0.0)
    faster, _ = run(tx.update, tree(20), after, params)
    assert_orthogonal(faster, 3 * RATE * 0.2 * 4)
    bare = optimizer(momentum=0.0)
    expected, _ = bare.update(tree(20), bare.init(params), params)
    close(faster["hidden"]["kernel"], 3 * expected["hidden"]["kernel"])  # no momentum is left
    assert float(
        optax.tree.get(after, "learning_rate", filtering=lambda _, x: isinstance(x, jax.Array))
    ) == np.float32(3 * RATE)


def test_injected_schedules_start_at_zero_and_match_plain_ones():  # optax #415, #1532, #1744
    params = tree()
    schedule = lambda t: RATE * jnp.asarray(t, jnp.float32)
    injected = optax.inject_hyperparams(muon)(schedule, weight_decay=0.0)
    bare = muon(schedule, weight_decay=0.0)
    state, other = injected.init(params), bare.init(params)
    for t in range(4):
        updates, state = run(injected.update, tree(t), state, params)
        expected, other = run(bare.update, tree(t), other, params)
        close(updates, expected)
        assert bool(jnp.any(updates["hidden"]["kernel"])) is (t > 0)
        assert bool(jnp.any(updates["embed"]["embedding"])) is (t > 0)
    assert_orthogonal(updates, 3 * RATE * 0.2 * 4)


def test_masks_need_static_args():
    params = tree()
    mask = {"hidden": True, "embed": False}
    tx = optax.inject_hyperparams(muon, static_args=("weight_decay_mask",))(1.0, weight_decay_mask=mask)
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    close(updates["hidden"]["kernel"], -0.1 * params["hidden"]["kernel"])
    assert not jnp.any(updates["embed"]["embedding"])


# --- MultiSteps, apply_if_finite


@pytest.mark.parametrize("gradient_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
def test_multi_steps_equals_the_mean_gradient(param_dtype, gradient_dtype):  # optax #1039, #1122
    params = tree(dtype=param_dtype)
    tx = optax.MultiSteps(optimizer(), 2)
    state = tx.init(params)
    halves = tree(10, gradient_dtype), tree(20, gradient_dtype)
    first, state = run(tx.update, halves[0], state, params)
    assert not any(jnp.any(u) for u in jax.tree.leaves(first))
    second, state = run(tx.update, halves[1], state, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(second, params)
    assert_orthogonal(second)
    if param_dtype == gradient_dtype == jnp.float32:
        mean = jax.tree.map(lambda a, b: (a + b) / 2, *halves)
        expected, _ = optimizer().update(mean, optimizer().init(params), params)
        # measured 1.5e-8: the mean is formed in another order
        chex.assert_trees_all_close(second, expected, rtol=1e-4, atol=1e-7)
    assert int(state.gradient_step) == 1


def test_not_finite_steps_never_happened():  # optax #1746
    params = tree()
    tx = optax.apply_if_finite(optimizer(), 3)
    good, state = tree(10), tx.init(params)
    bad = good | {"embed": {"embedding": good["embed"]["embedding"].at[0, 0].set(jnp.nan)}}
    _, state = run(tx.update, good, state, params)
    for _ in range(2):
        skipped, after = run(tx.update, bad, state, params)
        assert not any(jnp.any(u) for u in jax.tree.leaves(skipped))
        chex.assert_trees_all_equal(after.inner_state, state.inner_state)
    updates, _ = run(tx.update, good, after, params)
    close(updates, plain(steps=2)[0])
    assert_orthogonal(updates)


# --- masked, multi_transform


def test_masked_leaves_pass_and_prefixes_work():  # optax #271, #159
    params, gradients = tree(), tree(10)
    for mask in (
        {"hidden": True, "embed": False},
        lambda p: {"hidden": jax.tree.map(lambda _: True, p["hidden"]), "embed": False},
    ):
        tx = optax.masked(optimizer(), mask)
        updates, state = run(tx.update, gradients, tx.init(params), params)
        chex.assert_trees_all_equal(updates["embed"], gradients["embed"])  # Optax's way: untouched
        close(updates["hidden"], plain()[0]["hidden"])
        assert_orthogonal(updates)
        held = sum(x.size for x in jax.tree.leaves(state))
        assert held < params["embed"]["embedding"].size


def test_inside_partition_and_with_frozen_parts():  # optax #477, #993
    params, gradients = tree(), tree(10)
    labels = {"hidden": "train", "embed": "frozen"}
    for tx in (
        optax.partition({"train": optimizer(), "frozen": optax.set_to_zero()}, labels),
        optax.multi_transform(
            {"train": optimizer(), "frozen": optax.set_to_zero()},
            lambda p: {k: jax.tree.map(lambda _, k=k: labels[k], v) for k, v in p.items()},
        ),
    ):
        updates, _ = run(tx.update, gradients, tx.init(params), params)
        assert not jnp.any(updates["embed"]["embedding"])
        close(updates["hidden"], plain()[0]["hidden"])
        assert_orthogonal(updates)


def test_two_of_ours_in_one_partition():
    params, gradients = {"a": tree(), "b": tree(5)}, {"a": tree(10), "b": tree(10)}
    tx = optax.partition(
        {"slow": optimizer(), "fast": muon(2 * RATE, weight_decay=0.0)}, {"a": "slow", "b": "fast"}
    )
    updates, _ = run(tx.update, gradients, tx.init(params), params)
    close(jax.tree.map(lambda u: 2 * u, updates["a"]), updates["b"])
    assert_orthogonal(updates["a"])


def test_param_labels_for_a_multi_transform_of_ones_own():
    params, gradients = tree(), tree(10)
    tx = optax.multi_transform(
        {
            "muon": optax.chain(
                optax_muon.scale_by_muon(), optax_muon.scale_by_shape(), optax.scale_by_learning_rate(RATE)
            ),
            "adamw": optax.adamw(RATE, b2=0.95, weight_decay=0.0),
        },
        optax_muon.param_labels(params),
    )
    updates, _ = run(tx.update, gradients, tx.init(params), params)
    close(updates, plain()[0])
    assert_orthogonal(updates)


# --- averages of weights


def test_schedule_free_trains_and_evaluates():
    params, target = tree(), tree(40)
    loss = lambda p: sum(
        jnp.sum((a - b) ** 2) for a, b in zip(jax.tree.leaves(p), jax.tree.leaves(target), strict=True)
    )
    tx = optax.contrib.schedule_free(muon(0.3, weight_decay=0.0, momentum=0.0), 0.3, b1=0.9)
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state, updates

    before, z = loss(params), state.z
    params, state, _ = step(params, state)
    moved = jax.tree.map(jnp.subtract, state.z, z)
    assert_orthogonal(moved, 0.3 * 0.2 * 4)  # the fast weights make whole Muon steps
    for _ in range(30):
        params, state, _ = step(params, state)
    evaluated = optax.contrib.schedule_free_eval_params(state, params)
    assert loss(evaluated) < 0.5 * before
    assert loss(evaluated) < loss(tree())


def test_lookahead_synchronises_every_other_step():
    start = tree()
    params = optax.LookaheadParams.init_synced(start)
    tx = optax.lookahead(optimizer(), sync_period=2, slow_step_size=0.5)
    state = tx.init(params)
    for t in range(2):
        updates, state = run(tx.update, tree(10), state, params)
        params = optax.apply_updates(params, updates)
        if t == 0:
            assert_orthogonal(updates.fast)
            close(updates.fast, plain()[0])
            assert not any(jnp.any(u) for u in jax.tree.leaves(updates.slow))
    chex.assert_trees_all_close(params.fast, params.slow, atol=1e-7)
    halfway = jax.tree.map(lambda p, a, b: p + 0.5 * (a + b), start, plain(steps=1)[0], plain(steps=2)[0])
    chex.assert_trees_all_close(params.slow, halfway, atol=1e-6)  # measured 6e-8


def test_ema_of_params_follows_them():
    params = tree()
    tx, ema = optimizer(), optax.ema(0.5, debias=False)
    state, average = tx.init(params), ema.init(params)
    expected = jax.tree.map(jnp.zeros_like, params)
    for _ in range(3):
        updates, state = run(tx.update, tree(10), state, params)
        params = optax.apply_updates(params, updates)
        smoothed, average = ema.update(params, average)
        expected = jax.tree.map(lambda e, p: 0.5 * e + 0.5 * p, expected, params)
    assert_orthogonal(updates)
    close(smoothed, expected)


# --- the state, looked at and changed


TREES_OF_LABELS = {
    "rules": {},
    "trees": {
        "param_labels": {"hidden": None, "embed": "adamw"},
        "weight_decay_mask": {"hidden": True, "embed": {"embedding": False}},
        "rules": [Rule("hidden/kernel", MatrixView(0, 1))],
    },
}


@pytest.mark.parametrize("arguments", TREES_OF_LABELS.values(), ids=TREES_OF_LABELS)
def test_tree_map_params_sees_momentum_and_both_moments(arguments):  # EasyDeL #279
    params = tree()
    tx = optax.chain(optax.clip_by_global_norm(1.0), optimizer(**arguments))
    state = tx.init(params)
    is_hole = lambda x: isinstance(x, optax.MaskedNode)
    ones = optax.tree.map_params(tx, jnp.ones_like, state)
    muon_state, adamw_state = (ones[1].inner_states[k].inner_state[0] for k in ("muon", "adamw"))
    assert jnp.all(muon_state.mu["hidden"]["kernel"] == 1)
    assert is_hole(muon_state.mu["embed"]["embedding"])
    assert jnp.all(adamw_state.nu["embed"]["embedding"] == 1)
    assert int(muon_state.count) == 0
    specs = {"hidden": {"kernel": "k", "bias": "b"}, "embed": {"embedding": "e"}}
    spread = optax.tree.map_params(
        tx,
        lambda s, spec: s if is_hole(s) else spec,
        state,
        specs,
        transform_non_params=lambda _: None,
        is_leaf=is_hole,
    )
    assert spread[1].inner_states["muon"].inner_state[0].mu["hidden"]["kernel"] == "k"
    assert spread[1].inner_states["adamw"].inner_state[0].mu["hidden"]["bias"] == "b"


def test_tree_get_and_set():  # optax #964, mesh-transformer-jax #25
    params = tree()
    tx = muon(lambda t: RATE * (t + 1), weight_decay=0.0)
    state = tx.init(params)
    _, state = run(tx.update, tree(10), state, params)
    counts = optax.tree.get_all_with_path(state, "count")
    assert {int(value) for _, value in counts} == {1}
    of_muon = optax.tree.get(state, "mu", filtering=lambda path, _: "'muon'" in jax.tree_util.keystr(path))
    np.testing.assert_allclose(of_muon["hidden"]["kernel"], 0.05 * tree(10)["hidden"]["kernel"], rtol=1e-5)
    moved = optax.tree.set(state, count=jnp.asarray(9, jnp.int32))  # one clock for both halves
    updates, after = run(tx.update, tree(10), moved, params)
    assert_orthogonal(updates, 10 * RATE * 0.2 * 4)
    assert {int(value) for _, value in optax.tree.get_all_with_path(after, "count")} == {10}


def test_momentum_of_one_leaf_is_reset_in_place():  # optax #1371
    params = tree()
    tx, traces = optimizer(), []

    @jax.jit
    def update(gradients, state):
        traces.append(1)
        return tx.update(gradients, state, params)

    _, state = update(tree(10), tx.init(params))
    wipe = lambda path, x: jnp.zeros_like(x) if "hidden/kernel" in path else x
    paths = optax_muon.parameters.leaf_paths(state)
    leaves, treedef = jax.tree.flatten(state)
    reset = treedef.unflatten([wipe(path, x) for path, x in zip(paths, leaves, strict=True)])
    chex.assert_trees_all_equal_shapes_and_dtypes(reset, state)
    updates, _ = update(tree(20), reset)
    assert len(traces) == 1
    fresh, _ = tx.update(tree(20), tx.init(params), params)
    close(updates["hidden"]["kernel"], fresh["hidden"]["kernel"])
    assert_orthogonal(updates)


def test_extra_arguments_pass_through_wrappers():  # optax #1131
    params, gradients = tree(), tree(10)
    for tx in (
        optax.chain(optax.clip(1e9), optimizer()),
        optax.apply_if_finite(optimizer(), 3),
        optax.masked(optimizer(), lambda p: jax.tree.map(lambda _: True, p)),
        optax.inject_hyperparams(muon)(RATE, weight_decay=0.0),
    ):
        update = optax.with_extra_args_support(tx).update
        updates, _ = update(gradients, tx.init(params), params, value=1.0, anything=None)
        close(updates, plain()[0])
    reduced = optax.chain(optimizer(), optax.contrib.reduce_on_plateau())
    updates, _ = reduced.update(gradients, reduced.init(params), params, value=jnp.asarray(1.0))
    assert_orthogonal(updates)


def test_a_model_with_functions_in_it_is_named():  # equinox #590, #364
    model = {"hidden": tree()["hidden"], "activation": jax.nn.relu}
    with pytest.raises(TypeError, match=r"`activation` is a .*not an array"):
        optimizer().init(model)
