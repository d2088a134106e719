"""Rates, decay, clipping, schedules: faults of other packages, as what must hold here."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optax_muon import muon
from tests import reference as ref


def normal(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def tree(seed=0):
    return {"up": {"kernel": normal((8, 16), seed)}, "embed": {"embedding": normal((12, 8), seed + 1)}}


def step(tx, params, gradients):
    return tx.update(gradients, tx.init(params), params)[0]


# measured 1e-6 relative to the update; bound 2e-5
CLOSE = {"rtol": 0, "atol": 2e-5}


@pytest.mark.parametrize("nesterov", ["torch", "optax", None])
def test_the_momentum_follows_the_papers(nesterov):
    # chandar-lab/NeoBERT #10, NVIDIA-NeMo/Emerging-Optimizers #65: the forms differ, each is what it says
    tx, params = muon(1e-2, nesterov=nesterov), tree()
    gradients = [tree(10 + t) for t in range(5)]
    state, path, update = tx.init(params), [], jax.jit(tx.update)
    for g in gradients:
        updates, state = update(g, state, params)
        params = optax.apply_updates(params, updates)
        path.append(params)
    kernels = ref.muon_trajectory(
        tree()["up"]["kernel"], [g["up"]["kernel"] for g in gradients], learning_rate=1e-2, nesterov=nesterov
    )
    chex.assert_trees_all_close([p["up"]["kernel"] for p in path], list(kernels.astype(np.float32)), **CLOSE)
    rows = ref.adamw_trajectory(
        tree()["embed"]["embedding"], [g["embed"]["embedding"] for g in gradients], learning_rate=1e-2
    )
    chex.assert_trees_all_close(
        [p["embed"]["embedding"] for p in path], list(rows.astype(np.float32)), **CLOSE
    )


def test_schedules_start_at_zero_in_a_wrapper_too():  # google-deepmind/optax #415, #1744; microsoft/dion #108
    params, zero = tree(), jax.tree.map(jnp.zeros_like, tree())
    tx = optax.inject_hyperparams(muon)(lambda t: 1.0 * t, weight_decay=lambda t: 0.1 * (t + 1))
    state, update = tx.init(params), jax.jit(tx.update)
    for t in range(3):
        updates, state = update(zero, state, params)
        # measured 1e-7; rate and decay see the same step
        chex.assert_trees_all_close(
            updates, jax.tree.map(lambda p, t=t: -t * 0.1 * (t + 1) * p, params), rtol=1e-5
        )


def test_the_rates_of_a_step_can_be_read():  # google-deepmind/optax #964, #206; google/flax #4320
    schedules = optax.linear_schedule(1.0, 0.0, 10), optax.linear_schedule(0.5, 0.0, 10)
    tx = muon(schedules[0], adamw_learning_rate=schedules[1], weight_decay=1.0)
    params, zero = tree(), jax.tree.map(jnp.zeros_like, tree())
    state = tx.init(params)
    for _ in range(3):
        clock = optax.tree.get_all_with_path(state, "count")
        (t,) = {int(count) for _, count in clock}  # one clock, however often it is written down
        updates, state = tx.update(zero, state, params)
        rates = tx.config.learning_rate(t), tx.config.adamw_learning_rate(t)
        expected = {
            "up": {"kernel": -rates[0] * params["up"]["kernel"]},
            "embed": {"embedding": -rates[1] * params["embed"]["embedding"]},
        }
        chex.assert_trees_all_close(updates, expected, rtol=1e-6)


def test_rates_and_decays_are_no_part_of_the_program():  # google-deepmind/optax #577
    params = tree()

    def program(rate, decay, momentum):
        tx = optax.inject_hyperparams(muon)(rate, weight_decay=decay, momentum=momentum)
        return jax.jit(tx.update).lower(params, tx.init(params), params).as_text()

    assert program(1e-3, 0.1, 0.95) == program(2e-3, 0.01, 0.9)


def modes():
    """The same step in every mode: (name, function of gradients and parameters)."""
    tx = muon(1.0, weight_decay=0.0)
    everything = jax.tree.map(lambda _: True, tree())
    mesh = lambda kind: jax.make_mesh((4,), ("data",), axis_types=(kind,))

    def on(kind, spec):
        put = lambda t: jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh(kind), spec)), t)
        return lambda p, g: jax.jit(lambda p, g: step(tx, p, g))(put(p), put(g))

    def pmapped(p, g):
        stack = lambda t: jax.tree.map(lambda x: jnp.stack([x] * 2), t)
        split = muon(1.0, weight_decay=0.0, pmap_axis_name="replicas")
        both = jax.pmap(lambda p, g: step(split, p, g), axis_name="replicas", devices=jax.devices()[:2])
        first, second = (jax.tree.map(lambda x, i=i: x[i], both(stack(p), stack(g))) for i in range(2))
        chex.assert_trees_all_equal(first, second)
        return first

    def shard_mapped(p, g):
        whole = jax.tree.map(lambda _: P(), p)
        f = jax.shard_map(
            lambda p, g: step(tx, p, g), mesh=mesh(AxisType.Auto), in_specs=(whole, whole), out_specs=whole
        )
        return jax.jit(f)(p, g)

    return {
        "eager": lambda p, g: step(tx, p, g),
        "jit": lambda p, g: jax.jit(lambda p, g: step(tx, p, g))(p, g),
        "pmap": pmapped,
        "shard_map": shard_mapped,
        "explicit mesh": on(AxisType.Explicit, P("data")),
        "auto mesh": on(AxisType.Auto, P(None, "data")),
        "masked": lambda p, g: step(optax.masked(tx, everything), p, g),
        "multi_steps": lambda p, g: step(optax.MultiSteps(tx, 1), p, g),
        "inject": lambda p, g: step(optax.inject_hyperparams(muon)(1.0, weight_decay=0.0), p, g),
    }


@pytest.mark.parametrize("mode", modes())
def test_muon_runs_in_every_mode(mode):  # deepspeedai/DeepSpeed #8442
    params, gradients = tree(), tree(1)
    updates = jax.device_get(modes()[mode](params, gradients))
    expected = -0.2 * 4 * ref.newton_schulz(np.asarray(gradients["up"]["kernel"], np.float64))
    np.testing.assert_allclose(updates["up"]["kernel"], expected, **CLOSE)
    singular = np.linalg.svd(updates["up"]["kernel"], compute_uv=False) / (0.2 * 4)
    assert 0.6 < singular.min() <= singular.max() < 1.3
