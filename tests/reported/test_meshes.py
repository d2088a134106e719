"""Meshes: faults of other packages that the tests of the sharding layer do not name, as what must hold here."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optax_muon import MatrixView, Rule, contiguous_blocks, muon

KINDS = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}


def normal(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def make_mesh(kind):
    return jax.make_mesh((4,), ("model",), axis_types=(KINDS[kind],))


def step(tx, params, gradients):
    return tx.update(gradients, tx.init(params), params)[0]


def on_mesh_and_alone(tx, host, slope, kind, spec):
    mesh = make_mesh(kind)
    put = lambda t: jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec)), t)
    alone = jax.jit(lambda p, g: step(tx, p, g))(host, slope)
    cut = jax.jit(lambda p, g: step(tx, p, g))(put(host), put(slope))
    for leaf in jax.tree.leaves(cut):
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec), leaf.ndim)
    return jax.device_get(cut), jax.device_get(alone)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", [P("model"), P(None, "model")], ids=["rows", "columns"])
@pytest.mark.parametrize("cut_axis", [0, 1])
def test_blocks_and_their_factors_do_not_depend_on_the_mesh(kind, spec, cut_axis):
    # NVIDIA/Megatron-LM #6326: more devices than query groups; microsoft/dion #114: factors follow the block
    sizes = (24, 4, 4)  # Q of 6 heads, K and V of one: the mesh of 4 cuts through all of them
    shape = (16, 32) if cut_axis == 1 else (32, 16)
    view = MatrixView(1 - cut_axis, cut_axis, contiguous_blocks(cut_axis, sizes))
    tx = muon(1.0, weight_decay=0.0, rules=Rule("qkv/kernel", view))
    params, gradients = {"qkv": {"kernel": normal(shape)}}, {"qkv": {"kernel": normal(shape, 1)}}
    cut, alone = on_mesh_and_alone(tx, params, gradients, kind, spec)
    chex.assert_trees_all_close(cut, alone, atol=1e-5)  # measured 1e-6
    update = alone["qkv"]["kernel"] if cut_axis == 1 else alone["qkv"]["kernel"].T
    for start, n in ((0, 24), (24, 4), (28, 4)):
        singular = np.linalg.svd(update[:, start : start + n], compute_uv=False) / (0.2 * max(16, n) ** 0.5)
        assert 0.6 < singular.min() <= singular.max() < 1.25


@pytest.mark.parametrize("kind", KINDS)
def test_a_shard_of_zeros_is_harmless(kind):  # MoonshotAI/Moonlight #27, KellerJordan/Muon #45
    slope = normal((8, 16), 1)
    slope[:, 12:] = 0
    params = {"dense": {"kernel": normal((8, 16))}}
    cut, alone = on_mesh_and_alone(
        muon(1.0, weight_decay=0.0), params, {"dense": {"kernel": slope}}, kind, P(None, "model")
    )
    chex.assert_trees_all_close(cut, alone, atol=1e-5)  # measured 5e-7
    assert np.linalg.matrix_rank(cut["dense"]["kernel"]) == 8
    assert not cut["dense"]["kernel"][:, 12:].any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_vector_forced_to_muon_may_be_cut_along(kind):  # vllm-project/speculators #821
    params = {"head": {"kernel": normal((64, 1))}}
    tx = muon(1.0, weight_decay=0.0, rules=Rule("head/kernel", MatrixView(0, 1)))
    cut, alone = on_mesh_and_alone(tx, params, params, kind, P("model"))
    chex.assert_trees_all_close(cut, alone, atol=1e-5)  # measured 1e-7
    assert 0.68 < np.linalg.norm(cut["head"]["kernel"]) / (0.2 * 8) < 1.14


def test_gradients_that_nobody_reduced_raise():  # deepspeedai/DeepSpeed #8090
    mesh = make_mesh("auto")
    params = {"dense": {"kernel": normal((8, 16))}}
    tx = muon(1.0)

    def train(params, x, reduce):
        local = jax.lax.pcast(params, "model", to="varying")  # or grad would sum by itself
        g = jax.grad(lambda p: jnp.mean((x @ p["dense"]["kernel"]) ** 2))(local)
        return step(tx, params, jax.lax.pmean(g, "model") if reduce else g)

    run = lambda reduce: jax.jit(
        jax.shard_map(lambda p, x: train(p, x, reduce), mesh=mesh, in_specs=(P(), P("model")), out_specs=P())
    )(params, normal((8, 8)))
    with pytest.raises(ValueError, match="dense/kernel"):
        run(False)
    assert np.linalg.matrix_rank(run(True)["dense"]["kernel"]) == 8


def test_built_inside_a_trace_and_used_in_another():  # google-deepmind/optax #1186
    kept, params = {}, {"dense": {"kernel": normal((8, 16))}}

    def build(p):
        kept["tx"] = muon(1.0, weight_decay=0.0)
        return step(kept["tx"], p, p)

    f = jax.shard_map(build, mesh=make_mesh("auto"), in_specs=P(), out_specs=P())
    first = jax.jit(f)(params)
    second = jax.jit(lambda p: step(kept["tx"], p, p))(params)
    chex.assert_trees_all_close(jax.device_get(first), jax.device_get(second), atol=1e-5)  # measured 1e-6
    assert np.linalg.matrix_rank(second["dense"]["kernel"]) == 8


def test_momentum_may_lie_in_host_memory():  # marin-community/marin #3766, apple/axlearn #867
    mesh = make_mesh("explicit")
    device = NamedSharding(mesh, P("model"))
    host = device.with_memory_kind("pinned_host")
    params = jax.tree.map(lambda x: jax.device_put(x, device), {"dense": {"kernel": normal((8, 16))}})
    tx = muon(1.0)
    matrices = lambda state, where: jax.tree.map(lambda x: jax.device_put(x, where) if x.ndim else x, state)

    @jax.jit
    def train(params, state):
        updates, state = tx.update(params, matrices(state, device), params)
        return updates, matrices(state, host)

    state = matrices(tx.init(params), host)
    updates, after = train(params, state)
    expected, _ = tx.update(params, tx.init(params), params)
    chex.assert_trees_all_close(updates, expected, atol=1e-5)  # measured 2e-6
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        assert (old.dtype, old.shape) == (new.dtype, new.shape)
        assert new.ndim == 0 or new.sharding.memory_kind == "pinned_host"


def test_two_exchanges_for_many_leaves_and_none_in_the_iteration():
    # goodfire-ai/spd #978: collectives in every iteration; marin-community/marin #6493: a gather at the boundary
    mesh, host = make_mesh("explicit"), {f"layer{i}": {"kernel": normal((8, 16), i)} for i in range(12)}
    rows = NamedSharding(mesh, P("model"))
    params = jax.tree.map(lambda x: jax.device_put(x, rows), host)
    tx = muon(1.0, weight_decay=0.0)
    compiled = jax.jit(tx.update).lower(params, tx.init(params), params).compile()
    names = "all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute"
    found = re.findall(rf" ({names})(?:-start)?\(", compiled.as_text())
    assert found == ["all-to-all"] * 2
    updates, _ = compiled(params, tx.init(params), params)
    assert all(u.sharding.is_equivalent_to(rows, 2) for u in jax.tree.leaves(updates))
    assert np.linalg.matrix_rank(updates["layer3"]["kernel"]) == 8
