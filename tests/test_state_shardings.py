"""State shardings: every leaf where its parameter is, or cut further (ZeRO-1), and exact updates."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import optax_muon
from optax_muon import muon, scale_by_muon, state_shardings

SHAPES = {
    "up": {"kernel": (16, 32), "bias": (32,)},
    "down": {"kernel": (32, 16)},
    "embed": {"embedding": (8, 16)},
}
KINDS = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}


def tree(seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda s: rng.normal(size=s).astype(dtype), SHAPES, is_leaf=lambda x: isinstance(x, tuple)
    )


def make_mesh(kind, sizes=(2, 2)):
    return jax.make_mesh(sizes, ("data", "model"), axis_types=(KINDS[kind],) * 2)


def put(values, mesh, spec):
    """Matrices as the spec says, vectors cut by the spec's first axis name if it divides them."""
    vector = P(next((name for name in spec if name), None))
    return jax.tree.map(
        lambda x: jax.device_put(x, NamedSharding(mesh, vector if x.ndim == 1 else spec)),
        values,
    )


def lies_as(tree, shardings):
    return all(
        jax.tree.leaves(jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), tree, shardings))
    )


def shardings_of(tree):
    return jax.tree.map(lambda x: x.sharding, tree)


def clipped(**arguments):
    # Not clip_by_global_norm, which jax 0.10.2 cannot run eagerly on an Explicit mesh (it takes imag of each leaf).
    return optax.chain(optax.clip(1.0), muon(1e-2, **arguments))


WRAPPERS = {
    "chain": clipped,
    "multi_steps": lambda: optax.MultiSteps(clipped(), 2),
    "apply_if_finite": lambda: optax.apply_if_finite(clipped(), 2),
    "inject": lambda: optax.inject_hyperparams(muon)(1e-2),
    "masked_prefix": lambda: optax.masked(muon(1e-2), {"up": True, "down": True, "embed": False}),
    "partition": lambda: optax.partition({"a": muon(1e-2)}, lambda p: jax.tree.map(lambda _: "a", p)),
    "schedule_free": lambda: optax.contrib.schedule_free(muon(1e-2), 1e-2),
    "ema": lambda: optax.chain(muon(1e-2), optax.ema(0.9)),
    "int8": lambda: muon(1e-2, mu_dtype="int8"),
    "own_label": lambda: muon(1e-2, transforms={"adamw": optax.sgd(0.1, momentum=0.9)}),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_every_leaf_lies_as_its_parameter(wrapper):  # EasyDeL #279, optax #548
    optimizer = WRAPPERS[wrapper]()
    params = put(tree(), make_mesh("auto"), P(None, "model"))
    shardings = state_shardings(optimizer, params)
    state = jax.jit(optimizer.init, out_shardings=shardings)(params)
    assert lies_as(state, shardings)
    chex.assert_trees_all_equal_structs(shardings, jax.eval_shape(optimizer.init, params))
    specs = {s.spec for s in jax.tree.leaves(shardings)}
    assert P(None, "model") in specs
    assert P() in specs
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
        assert sharding.spec == P() or leaf.ndim
    # Abstract parameters give the same, so that nothing has to fit into memory (flax #5110).
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
    chex.assert_trees_all_equal(shardings, state_shardings(optimizer, abstract))


def train(optimizer, params, state, gradients):
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


def two_steps(step, optimizer, params, state, gradients):
    return step(optimizer, *step(optimizer, params, state, gradients), gradients)


JITTED = jax.jit(train, static_argnums=0)


@functools.cache
def on_one_device(mu_dtype):
    params = jax.tree.map(jnp.asarray, tree())
    optimizer = clipped(mu_dtype=mu_dtype)
    return jax.device_get(two_steps(JITTED, optimizer, params, optimizer.init(params), tree(1))[0])


@pytest.mark.parametrize(
    ("kind", "spec", "mu_dtype", "step"),
    [
        ("explicit", P(), None, JITTED),
        ("explicit", P("model"), None, train),
        ("explicit", P(None, "model"), "int8", JITTED),
        ("auto", P(), None, train),
        ("auto", P("model"), None, JITTED),
        ("auto", P(None, "model"), "int8", JITTED),
    ],
    ids=lambda x: {id(JITTED): "jit", id(train): "eager"}.get(id(x), str(x)),
)
def test_momentum_cut_further_gives_exact_updates_and_moves_nothing(kind, spec, mu_dtype, step):
    """ZeRO-1.  flax #5172, maxtext #4996, dion #18."""
    mesh = make_mesh(kind)
    params, gradients = put(tree(), mesh, spec), put(tree(1), mesh, spec)
    specs = shardings_of(params) if kind == "auto" else None
    optimizer = clipped(param_specs=specs, mu_dtype=mu_dtype)
    shardings = state_shardings(optimizer, params, shard_over="data")
    kernel = shardings[1].inner_states["muon"].inner_state[0].mu["up"]["kernel"]
    embedding = shardings[1].inner_states["adamw"].inner_state[0].nu["embed"]["embedding"]
    assert "data" in (kernel.values if mu_dtype else kernel).spec
    assert "data" in embedding.spec
    state = jax.jit(optimizer.init, out_shardings=shardings)(params)
    moved, after = two_steps(step, optimizer, params, state, gradients)
    assert lies_as(moved, shardings_of(params))
    assert lies_as(after, shardings)
    # measured 6.8e-6 at most, where an int8 rounding falls the other way (bound 1e-4); else bound 1e-6
    chex.assert_trees_all_close(
        jax.device_get(moved), on_one_device(mu_dtype), atol=1e-4 if mu_dtype else 1e-6
    )
    change = moved["down"]["kernel"] - 0.998 * params["down"]["kernel"]
    s = np.linalg.svd(np.asarray(change, np.float64), compute_uv=False)
    assert s[0] / s[-1] < 2.2  # Muon ran: measured 1.65


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_may_be_cut_as_the_momentum(kind):  # maxtext #4996
    """Parameters over 'model', gradients and moments over both axes of the same dimension (ZeRO-2)."""
    mesh = make_mesh(kind)
    names = {"dense": {"kernel": (16, 3)}, "embed": {"embedding": (16, 3)}, "bias": (16,)}
    rng = np.random.default_rng(0)
    host, slope = (
        jax.tree.map(
            lambda s: rng.normal(size=s).astype(np.float32), names, is_leaf=lambda x: isinstance(x, tuple)
        )
        for _ in range(2)
    )
    on = lambda t, *axes: jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P(axes))), t)
    params, gradients = on(host, "model"), on(slope, "model", "data")
    optimizer = muon(1e-2, param_specs=shardings_of(params))
    shardings = state_shardings(optimizer, params, shard_over="data")
    assert shardings.inner_states["muon"].inner_state[0].mu["dense"]["kernel"].spec == P(
        ("model", "data"), None
    )
    state = jax.jit(optimizer.init, out_shardings=shardings)(params)
    expected, _ = train(muon(1e-2), *((p := jax.tree.map(jnp.asarray, host)), muon(1e-2).init(p)), slope)
    moved, after = (JITTED if kind == "explicit" else train)(optimizer, params, state, gradients)
    assert lies_as(moved, shardings_of(params))
    assert lies_as(after, shardings)
    # measured 6e-8
    chex.assert_trees_all_close(jax.device_get(moved), jax.device_get(expected), atol=1e-6)
    bare = scale_by_muon()
    matrices = {"dense": params["dense"]}
    cut = jax.jit(bare.init, out_shardings=state_shardings(bare, matrices, "data"))(matrices)
    updates, after = bare.update({"dense": gradients["dense"]}, cut, matrices)
    assert lies_as(updates, shardings_of(matrices))
    assert lies_as(after.mu, shardings_of(cut.mu))


def test_host_memory_follows_the_parameter():  # marin #3766
    mesh = make_mesh("explicit")
    params = put(tree(), mesh, P("model"))
    shardings = state_shardings(muon(1e-2), params)
    hosted = jax.tree.map(lambda s: s.with_memory_kind("pinned_host"), shardings)
    mu = hosted.inner_states["muon"].inner_state[0].mu["up"]["kernel"]
    assert (mu.spec, mu.memory_kind) == (P("model"), "pinned_host")


def test_one_device_and_empty_trees():
    params = jax.tree.map(jnp.asarray, tree())
    shardings = state_shardings(muon(1e-2), params, shard_over="data")
    assert {type(s) for s in jax.tree.leaves(shardings)} == {SingleDeviceSharding}
    state = jax.jit(muon(1e-2).init, out_shardings=shardings)(params)
    chex.assert_trees_all_equal(state, muon(1e-2).init(params))
    assert jax.tree.leaves(state_shardings(muon(1e-2), {}))
    only = state_shardings(
        scale_by_muon(rules=[optax_muon.Rule("", optax_muon.MatrixView(0, 1))]), jnp.ones((4, 4))
    )
    assert len(jax.tree.leaves(only)) == 2


def test_missing_shardings_are_named():
    mesh = make_mesh("explicit")
    params = put(tree(), mesh, P())
    with pytest.raises(ValueError, match="`up/bias` has no NamedSharding"):
        state_shardings(muon(1e-2), params | {"up": params["up"] | {"bias": jnp.ones(32)}})
    with pytest.raises(ValueError, match="has no sharding to follow"):
        state_shardings(muon(1e-2), jax.eval_shape(lambda: tree()))
    with pytest.raises(ValueError, match=r"names the mesh axis 'fsdp'.*'data', 'model'"):
        state_shardings(muon(1e-2), params, shard_over=("data", "fsdp"))
    other = put(tree(), make_mesh("explicit", (4, 2)), P())
    with pytest.raises(ValueError, match="lies on the mesh"):
        state_shardings(muon(1e-2), params | {"up": other["up"]})
