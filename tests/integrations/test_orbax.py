"""Checkpoints on disk: Orbax across meshes, dtypes and recipes, msgpack, and a process killed in mid-save."""

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import chex
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_muon
from optax_muon import MatrixView, Rule, checkpoints, muon, recipes, state_shardings

SHAPES = {
    "up": {"kernel": (16, 32), "bias": (32,)},
    "down": {"kernel": (32, 16)},
    "embed": {"embedding": (8, 16)},
}


def tree(seed=0):
    rng = np.random.default_rng(seed)
    is_shape = lambda x: isinstance(x, tuple)
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s), jnp.float32), SHAPES, is_leaf=is_shape)


@functools.partial(jax.jit, static_argnums=0)
def step(optimizer, params, state, gradients):
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


def train(optimizer, params, state, seeds):
    for seed in seeds:
        gradients = jax.tree.map(lambda g, p: jax.device_put(g, p.sharding), tree(seed), params)
        params, state = step(optimizer, params, state, gradients)
    return params, state


def place(values, mesh, spec):
    return jax.tree.map(
        lambda x: jax.device_put(x, NamedSharding(mesh, spec if x.ndim == 2 else P())), values
    )


def abstract(optimizer, params, **arguments):
    """What Orbax restores onto: shapes, dtypes and shardings, no arrays."""
    shardings = state_shardings(optimizer, params, **arguments)
    struct = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    params = jax.tree.map(lambda x: struct(x, x.sharding), params)
    return params, jax.tree.map(struct, jax.eval_shape(optimizer.init, params), shardings)


def momentum(state):
    is_muon = lambda x: isinstance(x, optax_muon.ScaleByMuonState)
    return next(x for x in jax.tree.leaves(state, is_leaf=is_muon) if is_muon(x)).mu


def assert_muon_ran(before, after, rate=1e-2):
    change = (after["down"]["kernel"] - (1 - 0.1 * rate) * before["down"]["kernel"]) / (rate * 0.2 * 32**0.5)
    s = np.linalg.svd(np.asarray(change, np.float64), compute_uv=False)
    assert 0.6 < s.min() <= s.max() < 1.25


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Three steps on a 2 x 2 Explicit mesh with momentum cut further, and one more for comparison."""
    optimizer = muon(1e-2)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    params = place(tree(), mesh, P(None, "model"))
    shardings = state_shardings(optimizer, params, shard_over="data")
    state = jax.jit(optimizer.init, out_shardings=shardings)(params)
    params, state = train(optimizer, params, state, range(3))
    path = tmp_path_factory.mktemp("orbax") / "step3"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, {"params": params, "state": state})
    following = train(optimizer, params, state, [3])[0]
    assert_muon_ran(params, following)
    return path, params, state, jax.device_get(following)


def restore(path, params, state):
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(path, {"params": params, "state": state})
    return restored["params"], restored["state"]


@pytest.mark.parametrize("sizes", [(4, 2), (1, 8), (1, 1)], ids=str)
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
def test_states_are_restored_onto_another_mesh(saved, sizes, kind):
    """orbax #648, #1110, maxdiffusion #379, dion #18, Megatron-LM #6920, flax #5110."""
    path, _, state, following = saved
    mesh = jax.make_mesh(sizes, ("data", "model"), axis_types=(kind,) * 2)
    template = place(jax.tree.map(jnp.zeros_like, tree()), mesh, P("data", None))
    optimizer = muon(1e-2)
    wanted = abstract(optimizer, template)
    new_params, new_state = restore(path, *wanted)
    chex.assert_trees_all_equal(jax.device_get(new_state), jax.device_get(state))
    for leaf, target in zip(jax.tree.leaves(new_state), jax.tree.leaves(wanted[1]), strict=True):
        assert leaf.sharding.is_equivalent_to(target.sharding, leaf.ndim)
    if sizes == (1, 8) and kind == AxisType.Auto:
        return  # one compiled program less
    after, _ = train(optimizer, new_params, new_state, [3])
    # measured 1.2e-7; bound 1e-6
    chex.assert_trees_all_close(jax.device_get(after), following, atol=1e-6)
    for leaf in jax.tree.leaves(after):  # every device's copy is the same
        copies = {}
        for shard in leaf.addressable_shards:
            first = copies.setdefault(str(shard.index), np.asarray(shard.data))
            np.testing.assert_array_equal(first, np.asarray(shard.data))


def test_momentum_is_restored_in_bfloat16_and_back(saved):  # DeepSpeed #7746
    path, params, state, following = saved
    low = muon(1e-2, mu_dtype=jnp.bfloat16)
    _, state16 = restore(path, *abstract(low, params))
    expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16), momentum(state))
    chex.assert_trees_all_equal(momentum(state16), expected)
    assert {x.dtype for x in jax.tree.leaves(momentum(state16))} == {jnp.dtype(jnp.bfloat16)}
    after, _ = train(low, params, state16, [3])
    # measured 9.4e-6, steps of 2e-3; bound 2e-4
    chex.assert_trees_all_close(jax.device_get(after), following, atol=2e-4)


@pytest.mark.parametrize(
    "other",
    [
        lambda: recipes.keller(1e-2),
        lambda: muon(1e-2, orthogonalizer=optax_muon.Orthogonalizer(coefficients=optax_muon.DEEPSEEK_V4)),
    ],
    ids=["recipe", "coefficients"],
)
def test_another_recipe_takes_the_same_checkpoint(saved, other):  # optax #1186
    path, params, state, following = saved
    _, restored = restore(path, *abstract(other(), params))
    chex.assert_trees_all_equal(jax.device_get(restored), jax.device_get(state))
    after, _ = train(other(), params, restored, [3])
    assert not np.allclose(after["down"]["kernel"], following["down"]["kernel"], atol=1e-5)


def test_a_rerouted_leaf_starts_fresh_and_the_rest_is_kept(saved):
    path, params, state, _ = saved
    turned = muon(1e-2, rules=[Rule("up/kernel", None), Rule("embed/embedding", MatrixView(0, 1))])
    _, old = restore(path, *abstract(muon(1e-2), params))  # as it was saved
    with pytest.warns(UserWarning, match="start fresh") as caught:
        state_now = checkpoints.adapt(old, turned, params)
    message = str(caught[0].message)
    assert "mu/up/kernel" in message
    assert "mu/embed/embedding" in message
    assert "down" not in message
    chex.assert_trees_all_equal(momentum(state_now)["down"], momentum(state)["down"])
    assert not jnp.any(momentum(state_now)["embed"]["embedding"])
    after, _ = train(turned, params, state_now, [3])
    assert_muon_ran(params, after)


def test_a_restore_without_a_template_is_typed_again(saved):  # orbax #487, flax #4423, #4521
    path, params, state, _ = saved
    with ocp.StandardCheckpointer() as checkpointer:
        raw = checkpointer.restore(path)
    typed = checkpoints.adapt(jax.device_get(raw["state"]), muon(1e-2), params)
    chex.assert_trees_all_equal(jax.device_get(typed), jax.device_get(state))
    chex.assert_trees_all_equal_structs(typed, state)


GROUPS = {
    "no_adamw": {"dense": {"kernel": (8, 12)}},
    "no_muon": {"embed": {"embedding": (8, 12)}},
    "empty": {},
}


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("steps", [0, 1])
def test_empty_groups_are_saved_and_restored(tmp_path, group, steps):  # pytorch #143828, Megatron-LM #3885
    params = jax.tree.map(jnp.ones, GROUPS[group], is_leaf=lambda x: isinstance(x, tuple))
    optimizer = muon(1e-2)
    state = optimizer.init(params)
    for _ in range(steps):
        _, state = optimizer.update(params, state, params)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(optimizer.init, params))
    chex.assert_trees_all_equal(restored, state)
    optimizer.update(params, restored, params)


@pytest.mark.parametrize("mu_dtype", [None, jnp.bfloat16, "int8"])
def test_msgpack(mu_dtype):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), muon(1e-2, mu_dtype=mu_dtype))
    params = tree()
    _, state = optimizer.update(tree(1), optimizer.init(params), params)
    packed = flax.serialization.to_bytes(state)
    restored = jax.tree.map(jnp.asarray, flax.serialization.from_bytes(optimizer.init(params), packed))
    chex.assert_trees_all_equal(restored, state)
    again, _ = optimizer.update(tree(2), restored, params)
    expected, _ = optimizer.update(tree(2), state, params)
    chex.assert_trees_all_equal(again, expected)
    assert_muon_ran(params, optax.apply_updates(params, again))


TRAINER = """
import sys, numpy as np, jax, jax.numpy as jnp, optax, orbax.checkpoint as ocp
from optax_muon import muon
directory, steps = sys.argv[1], int(sys.argv[2])
rng = np.random.default_rng(0)
target = jnp.asarray(rng.normal(size=(64, 48)), jnp.float32)
params = {"hidden": {"kernel": jnp.asarray(rng.normal(size=(64, 48)), jnp.float32), "bias": jnp.zeros(48)}}
# Ballast makes a save last long enough to be killed in the middle of it.
ballast = {str(i): np.full((1 << 20,), i, np.float32) for i in range(24)}
optimizer = muon(optax.linear_schedule(1e-2, 0.0, 20))
state, first = optimizer.init(params), 0
manager = ocp.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(max_to_keep=3))
if manager.latest_step() is not None:
    first = manager.latest_step() + 1
    like = {"params": params, "state": state, "ballast": ballast}
    like = ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, like))
    restored = manager.restore(manager.latest_step(), args=like)
    params, state = restored["params"], restored["state"]
    mu = state.inner_states["muon"].inner_state[0].mu["hidden"]["kernel"]
    print("resumed", first, float(jnp.linalg.norm(mu)), flush=True)
loss = lambda p: jnp.mean((p["hidden"]["kernel"] + p["hidden"]["bias"] - target) ** 2)

@jax.jit
def step(params, state):
    value, gradients = jax.value_and_grad(loss)(params)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, value

for t in range(first, steps):
    params, state, value = step(params, state)
    print("saving", t, repr(float(value)), flush=True)
    manager.save(t, args=ocp.args.StandardSave({"params": params, "state": state, "ballast": ballast}))
    if len(sys.argv) > 3:
        manager.wait_until_finished()
manager.wait_until_finished()
print("done", repr(float(loss(params))), flush=True)
"""


def test_a_process_killed_in_mid_save_resumes_on_the_same_trajectory(tmp_path):
    """KempnerForge #115: momentum survives; maxdiffusion #484: what is restored is used."""
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    root = Path(optax_muon.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}

    def start(directory, *more):
        command = [sys.executable, str(script), str(tmp_path / directory), "8", *more]
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    straight = start("straight")
    broken = start("broken", "wait")
    for line in broken.stdout:
        if line.startswith("saving 4"):
            break
    # The save of step 4 is under way: wait for its temporary directory, then kill without warning.
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not any("tmp" in p.name for p in (tmp_path / "broken").iterdir()):
        time.sleep(0.001)
    broken.send_signal(signal.SIGKILL)
    broken.communicate()
    complete = sorted(int(p.name) for p in (tmp_path / "broken").iterdir() if p.name.isdigit())
    assert complete[-1] in (3, 4)
    expected = straight.communicate(timeout=240)[0].splitlines()
    assert straight.returncode == 0
    resumed = start("broken")
    output, errors = resumed.communicate(timeout=240)
    assert resumed.returncode == 0, errors
    lines = output.splitlines()
    assert lines[0].startswith(f"resumed {complete[-1] + 1} ")
    assert float(lines[0].split()[2]) > 0  # momentum is not what init makes
    assert lines[1:] == expected[complete[-1] + 1 :]  # the same losses, bit for bit
