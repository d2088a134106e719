"""States of other optimizers and configurations: what can be kept is kept bit for bit, the rest is named."""

import functools
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_muon
from optax_muon import MatrixView, Rule, checkpoints, contiguous_blocks, muon, shape_factors, state_shardings

SHAPES = {
    "attn": {"query": {"kernel": (16, 2, 8)}, "out": {"kernel": (2, 8, 16)}},
    "mlp": {"up": {"kernel": (16, 24), "bias": (24,)}, "down": {"kernel": (24, 16)}},
    "embed": {"embedding": (32, 16)},
    "norm": {"scale": (16,)},
}
MATRICES = [("attn", "query", "kernel"), ("attn", "out", "kernel"), ("mlp", "up", "kernel")]


def tree(seed=0):
    rng = np.random.default_rng(seed)
    is_shape = lambda x: isinstance(x, tuple)
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s), jnp.float32), SHAPES, is_leaf=is_shape)


# Equal optimizers are equal arguments, so the tests share compiled programs.
@functools.partial(jax.jit, static_argnums=0)
def step(optimizer, params, state, gradients):
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


def train(optimizer, params, state, steps, first=0):
    for t in range(first, first + steps):
        params, state = step(optimizer, params, state, tree(100 + t))
    return params, state


@functools.cache
def three_steps():
    return train(muon(1e-2), tree(), muon(1e-2).init(tree()), 3)


def at(t, path):
    for key in path:
        t = t[key]
    return t


def momentum(state):
    is_muon = lambda x: isinstance(x, optax_muon.ScaleByMuonState)
    return next(x for x in jax.tree.leaves(state, is_leaf=is_muon) if is_muon(x))


def adam(state):
    is_adam = lambda x: isinstance(x, optax.ScaleByAdamState)
    return next(x for x in jax.tree.leaves(state, is_leaf=is_adam) if is_adam(x))


def is_hole(x):
    return isinstance(x, optax.MaskedNode)


# --- adapt


@pytest.mark.parametrize(
    "other",
    [
        {"orthogonalizer": optax_muon.Orthogonalizer(coefficients=optax_muon.POLAR_EXPRESS)},
        {"shape_factor": shape_factors.sqrt_ratio(), "weight_decay": 0.0, "momentum": 0.9},
        {"nesterov": None, "adamw_b1": 0.8, "weight_decay_mask": None},
    ],
    ids=["coefficients", "factor", "numbers"],
)
def test_nothing_of_the_configuration_is_in_the_state(other):  # optax #1186
    params, state = three_steps()
    changed = muon(1e-2, **other)
    chex.assert_trees_all_equal_structs(state, changed.init(params))
    chex.assert_trees_all_equal(checkpoints.adapt(state, changed, params), state)
    after, _ = train(changed, params, state, 1)
    before, _ = train(muon(1e-2), params, state, 1)
    assert not np.allclose(after["mlp"]["up"]["kernel"], before["mlp"]["up"]["kernel"], atol=1e-6)


def test_rerouted_leaves_start_fresh_and_are_named():  # dion #89, Megatron-LM #3885
    params, state = three_steps()
    turned = muon(1e-2, rules=[Rule("mlp/up/kernel", None), Rule("embed/embedding", MatrixView(0, 1))])
    with pytest.warns(UserWarning, match="start fresh") as caught:
        after = checkpoints.adapt(state, turned, params)
    message = str(caught[0].message)
    for path in (
        "muon/inner_state/0/mu/embed/embedding",
        "adamw/inner_state/0/mu/mlp/up/kernel",
        "adamw/inner_state/0/nu/mlp/up/kernel",
    ):
        assert path in message
    assert message.count("`") == 6  # those three and no other
    chex.assert_trees_all_equal_shapes_and_dtypes(after, turned.init(params))
    old, new = momentum(state), momentum(after)
    for path in (("attn", "query", "kernel"), ("mlp", "down", "kernel")):
        chex.assert_trees_all_equal(at(new.mu, path), at(old.mu, path))
    chex.assert_trees_all_equal(adam(after).nu["norm"], adam(state).nu["norm"])
    assert not jnp.any(new.mu["embed"]["embedding"])
    assert not jnp.any(adam(after).nu["mlp"]["up"]["kernel"])
    assert int(new.count) == int(adam(after).count) == 3
    train(turned, params, after, 1)


@pytest.mark.parametrize("stored", [jnp.float32, "int8"])
def test_momentum_of_bfloat16_parameters_is_kept_in_another_dtype(stored):  # DeepSpeed #7746
    low = lambda t: jax.tree.map(lambda x: x.astype(jnp.bfloat16), t)
    params, usual, other = low(tree()), muon(1e-2), muon(1e-2, mu_dtype=stored)
    params, state = train(usual, params, usual.init(params), 3)
    params = low(params)
    after = checkpoints.adapt(state, other, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, other.init(params))
    back = checkpoints.adapt(after, usual, params)
    # bfloat16 to float32 and back loses nothing; int8 is off by 1/254 of the largest of a block: measured 1.1e-3
    tolerance = {"rtol": 1e-2, "atol": 3e-3} if stored == "int8" else {"rtol": 0, "atol": 0}
    chex.assert_trees_all_close(momentum(back).mu, momentum(state).mu, **tolerance)
    straight, resumed = (train(o, params, s, 1, first=3)[0] for o, s in ((usual, state), (other, after)))
    chex.assert_trees_all_equal_shapes_and_dtypes(straight, resumed)
    up = lambda t: jax.tree.map(lambda x: x.astype(jnp.float32), t)
    # measured 3.9e-3 (int8): steps of 2e-3 on weights of order 1 in bfloat16, whose last place is 1/128
    chex.assert_trees_all_close(up(resumed), up(straight), atol=2**-6)


@pytest.mark.parametrize("stored", [jnp.bfloat16, "int8", None])
def test_momentum_is_kept_in_another_dtype(stored):  # DeepSpeed #7746
    params, state = three_steps()
    other = muon(1e-2, mu_dtype=stored)
    after = checkpoints.adapt(state, other, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, other.init(params))
    chex.assert_trees_all_equal(adam(after), adam(state))
    back = checkpoints.adapt(after, muon(1e-2), params)
    if stored == jnp.bfloat16:
        rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), momentum(state).mu)
        chex.assert_trees_all_equal(momentum(back).mu, rounded)
    # int8: off by 1/254 of the largest of a block; bfloat16: 1/256 of each
    chex.assert_trees_all_close(momentum(back).mu, momentum(state).mu, rtol=4e-3, atol=2e-3 if stored else 0)
    straight, _ = train(muon(1e-2), params, state, 1, first=3)
    resumed, _ = train(other, params, after, 1, first=3)
    # measured 6.3e-5 at most (bf16, int8), steps of 2e-3; bound 3e-4
    chex.assert_trees_all_close(resumed, straight, atol=3e-4 if stored else 0)


def test_wrapping_and_schedules_may_change():  # mesh-transformer-jax #25, optax #1036
    params, state = three_steps()
    scheduled = optax.chain(optax.clip_by_global_norm(1.0), muon(lambda t: 1e-2 * (t + 1)))
    after = checkpoints.adapt(state, scheduled, params)
    counts = [int(c) for _, c in optax.tree.get_all_with_path(after, "count")]
    assert counts == [3] * len(counts)
    assert len(counts) == 4
    chex.assert_trees_all_equal(momentum(after), momentum(state))
    # One clock for rates, decay and bias correction; a restart of the schedule is a line of Optax.
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = scheduled.update(zero, optax.tree.set(after, count=jnp.asarray(7)), params)
    last = momentum(after).mu["mlp"]["up"]["kernel"]
    moved = updates["mlp"]["up"]["kernel"] + 8e-2 * 0.1 * params["mlp"]["up"]["kernel"]
    s = np.linalg.svd(np.asarray(moved, np.float64), compute_uv=False) / (8e-2 * 0.2 * 24**0.5)
    assert jnp.any(last)
    assert 0.6 < s.min() <= s.max() < 1.25


def test_fresh_moments_at_an_old_step():  # marin #1922
    params = tree()
    state = optax.tree.set(muon(lambda t: 1.0 * t).init(params), count=jnp.asarray(5))
    assert not any(jnp.any(x) for x in jax.tree.leaves(momentum(state).mu))
    updates, _ = muon(lambda t: 1.0 * t).update(jax.tree.map(jnp.zeros_like, params), state, params)
    chex.assert_trees_all_close(updates["embed"]["embedding"], -0.5 * params["embed"]["embedding"], rtol=1e-6)


def untyped(state):
    """What a restore without a template gives: dicts and lists, nothing where there was no array."""
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        return {k: untyped(v) for k, v in state._asdict().items()} or None
    if isinstance(state, tuple | list):
        return [untyped(x) for x in state]
    if isinstance(state, dict):
        return {k: untyped(v) for k, v in state.items()}
    if hasattr(state, "scales"):
        return {"values": np.asarray(state.values), "scales": np.asarray(state.scales)}
    return np.asarray(state)


@pytest.mark.parametrize("stored", [None, "int8"])
def test_states_restored_without_a_template_are_typed_again(stored):  # orbax #487, flax #4423, #4521
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), muon(1e-2, mu_dtype=stored))
    params, state = three_steps()
    state = (optax.EmptyState(), checkpoints.adapt(state, muon(1e-2, mu_dtype=stored), params))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chex.assert_trees_all_equal(checkpoints.adapt(untyped(state), optimizer, params), state)


def test_placement_is_kept_on_a_mesh():  # WAN trainer: maxdiffusion #484
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    params = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P())), tree())
    optimizer = muon(1e-2)
    cut = state_shardings(optimizer, params, shard_over="data")
    state = jax.jit(optimizer.init, out_shardings=cut)(params)
    after = checkpoints.adapt(state, muon(2e-2, mu_dtype=jnp.bfloat16), params)
    chex.assert_trees_all_equal(jax.tree.map(lambda x: x.sharding, after), cut)
    moved = checkpoints.adapt(untyped(jax.device_get(state)), optimizer, params)
    expected = state_shardings(optimizer, params)
    for leaf, sharding in zip(jax.tree.leaves(moved), jax.tree.leaves(expected), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def test_states_of_another_model_raise_with_paths():
    params = tree()
    state = muon(1e-2).init(params)
    wider = params | {"mlp": params["mlp"] | {"up": {"kernel": jnp.ones((16, 32)), "bias": jnp.ones(24)}}}
    with pytest.raises(ValueError, match=r"`.*mu/mlp/up/kernel` has shape \(16, 24\).*but \(16, 32\)"):
        checkpoints.adapt(state, muon(1e-2), wider)
    fewer = {k: v for k, v in params.items() if k != "attn"}
    with pytest.raises(ValueError, match=r"attn/out/kernel`, .* belong to no parameter"):
        checkpoints.adapt(state, muon(1e-2), fewer)
    with pytest.raises(ValueError, match="no array of the state fits this optimizer"):
        checkpoints.adapt(optax.adamw(1e-2).init(params), muon(1e-2), params)


# --- optax.contrib.muon


def peer(**arguments):
    return optax.contrib.muon(
        1e-2, adam_b2=0.95, adam_weight_decay=0.0, muon_weight_dimension_numbers=dimensions, **arguments
    )


def dimensions(params):
    """The same matrices as ours; heads and embeddings go to Adam, as here."""
    number = optax.contrib.MuonDimensionNumbers
    return {
        "attn": {"query": {"kernel": number(0, (1, 2))}, "out": {"kernel": number((0, 1), 2)}},
        "mlp": {"up": {"kernel": number(0, 1), "bias": None}, "down": {"kernel": number(0, 1)}},
        "embed": {"embedding": None},
        "norm": {"scale": None},
    }


def like_peer():
    """Our optimizer with the peer's numbers."""
    return muon(
        1e-2,
        nesterov="optax",
        shape_factor=shape_factors.sqrt_ratio_min_one(),
        weight_decay=0.0,
        adamw_nesterov=True,
    )


def test_training_goes_on_from_the_peer_and_back_again():
    theirs = peer()
    params, state = train(theirs, tree(), theirs.init(tree()), 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = checkpoints.from_optax_contrib(state, like_peer(), params)
    chex.assert_trees_all_equal_shapes_and_dtypes(ours, like_peer().init(params))
    for path in MATRICES:
        chex.assert_trees_all_equal(
            at(momentum(ours).mu, path), at(state.inner_states["muon"].inner_state[0].mu, path)
        )
    expected, after = train(theirs, params, state, 2, first=3)
    continued, ours = train(like_peer(), params, ours, 2, first=3)
    # measured 2.4e-7; the peer's normalisation adds an epsilon; steps are 1e-2
    chex.assert_trees_all_close(continued, expected, atol=2e-4)
    back = checkpoints.to_optax_contrib(ours, peer(), continued)
    chex.assert_trees_all_equal_shapes_and_dtypes(back, after)
    chex.assert_trees_all_close(
        back.inner_states["muon"].inner_state[0].mu,
        after.inner_states["muon"].inner_state[0].mu,
        rtol=1e-5,
        atol=1e-6,
    )
    chex.assert_trees_all_close(adam(back), adam(after), rtol=1e-4, atol=1e-6)
    assert int(back.inner_states["muon"].inner_state[0].count) == 5
    again = checkpoints.from_optax_contrib(back, like_peer(), continued)
    chex.assert_trees_all_equal(again, ours)


def test_leaves_that_the_peer_routes_otherwise_are_named():
    plain = optax.contrib.muon(1e-2)  # its rule is ndim == 2: embeddings to Muon, attention to Adam
    params, state = train(plain, tree(), plain.init(tree()), 2)
    with pytest.warns(UserWarning, match=r"start fresh, as init makes them: `embed/embedding`\."):
        ours = checkpoints.from_optax_contrib((optax.EmptyState(), state), muon(1e-2), params)
    query = ("attn", "query", "kernel")
    carried = at(state.inner_states["adam"].inner_state[0].mu, query)
    chex.assert_trees_all_equal(at(momentum(ours).mu, query), carried)
    assert jnp.any(carried)
    assert not jnp.any(adam(ours).nu["embed"]["embedding"])


# --- optax.adamw


@pytest.mark.parametrize("choice", ["carry", "fresh"])
def test_a_switch_from_adamw_keeps_what_stays_with_adamw(choice):
    old = optax.chain(optax.clip_by_global_norm(1e9), optax.adamw(1e-2, b2=0.95))
    params, state = train(old, tree(), old.init(tree()), 4)
    optimizer = muon(optax.linear_schedule(1e-2, 0.0, 10))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = checkpoints.from_adamw(state, optimizer, params, momentum=choice)
    chex.assert_trees_all_equal_shapes_and_dtypes(ours, optimizer.init(params))
    for name in ("embed", "norm"):
        for moment in ("mu", "nu"):
            chex.assert_trees_all_equal(getattr(adam(ours), moment)[name], getattr(state[1][0], moment)[name])
    for path in MATRICES:
        kept = at(momentum(ours).mu, path)
        chex.assert_trees_all_equal(kept, at(state[1][0].mu, path) * (choice == "carry"))
    assert {int(c) for _, c in optax.tree.get_all_with_path(ours, "count")} == {4}
    updates, _ = optimizer.update(tree(104), ours, params)
    expected, _ = optax.adamw(6e-3, b2=0.95, weight_decay=0.1).update(tree(104), state[1], params)
    # AdamW leaves go on as if nothing had happened, at the schedule's rate of step 4: measured 0
    chex.assert_trees_all_close(updates["embed"], expected["embed"], rtol=1e-5, atol=1e-8)


def test_adamw_states_that_do_not_fit_raise():
    params = tree()
    with pytest.raises(ValueError, match="momentum must be 'carry' or 'fresh', got 'keep'"):
        checkpoints.from_adamw(optax.adamw(1e-2).init(params), muon(1e-2), params, momentum="keep")
    with pytest.raises(ValueError, match="holds no moments"):
        checkpoints.from_adamw(params, muon(1e-2), params)
    smaller = {"norm": params["norm"]}
    with pytest.raises(ValueError, match=r"no moments were found for .*`attn/out/kernel`"):
        checkpoints.from_adamw(optax.adamw(1e-2).init(smaller), muon(1e-2), params)
    more = optax.adamw(1e-2).init(params | {"extra": jnp.ones(3)})
    with pytest.raises(ValueError, match="`extra` belong to no parameter"):
        checkpoints.from_adamw(more, muon(1e-2), params)


# --- torch


def to_torch(x, path):
    """A leaf in torch's layout: (out, in)."""
    x = np.asarray(x)
    if path == "attn/query/kernel":
        return x.reshape(16, 16).T
    if path == "attn/out/kernel":
        return x.reshape(16, 16).T
    return x.T if path.startswith("mlp") and x.ndim == 2 else x


def as_buffers(state, scale=1.0, names=("exp_avg", "exp_avg_sq")):
    paths = optax_muon.parameters.leaf_paths
    buffers = {}
    mu = momentum(state).mu
    for path, x in zip(paths(mu), jax.tree.leaves(mu), strict=True):
        buffers[path] = {"momentum_buffer": to_torch(x, path) * np.float32(scale)}
    first, second = adam(state).mu, adam(state).nu
    for path, m, v in zip(paths(first), jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        buffers[path] = {names[0]: to_torch(m, path), names[1]: to_torch(v, path), "step": np.float32(3)}
    return buffers


@pytest.mark.parametrize(
    ("form", "names"), [("average", ("exp_avg", "exp_avg_sq")), ("sum", ("moment1", "moment2"))]
)
def test_torch_states_come_back_exactly(form, names):
    params, state = three_steps()
    buffers = as_buffers(state, 1 / (1 - 0.95) if form == "sum" else 1.0, names)
    ours = checkpoints.from_torch(buffers, muon(1e-2), params, form=form, momentum=0.95)
    chex.assert_trees_all_equal_shapes_and_dtypes(ours, state)
    # measured 1.2e-7 relative (sum: one rounding there, one back)
    chex.assert_trees_all_close(ours, state, rtol=2e-7 if form == "sum" else 0)


def test_the_sum_form_is_the_average_over_one_minus_mu():
    """Moonlight's M <- mu M + g, run beside ours."""
    params = {"dense": {"kernel": jnp.zeros((8, 12))}}
    state, buffer = muon(1e-2).init(params), np.zeros((12, 8), np.float32)
    for seed in range(5):
        g = np.random.default_rng(seed).normal(size=(8, 12)).astype(np.float32)
        _, state = muon(1e-2).update({"dense": {"kernel": jnp.asarray(g)}}, state, params)
        buffer = 0.95 * buffer + g.T
    ours = checkpoints.from_torch(
        {"dense/kernel": {"momentum_buffer": buffer}}, muon(1e-2), params, form="sum"
    )
    # measured 7.5e-8, of values up to 0.24
    chex.assert_trees_all_close(momentum(ours).mu, momentum(state).mu, rtol=1e-5, atol=1e-7)


def test_torch_layouts_of_stacks_convolutions_and_fused_weights():
    rng = np.random.default_rng(0)
    shapes = {
        "stack": {"kernel": (3, 4, 6)},  # (layer, in, out)
        "conv": {"kernel": (3, 3, 4, 5)},  # HWIO
        "qkv": {"kernel": (4, 12)},
        "lm_head": {"kernel": (4, 7)},
    }
    is_shape = lambda x: isinstance(x, tuple)
    params = jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s), jnp.float32), shapes, is_leaf=is_shape)
    rules = [
        Rule("stack/kernel", MatrixView(1, 2)),
        Rule("qkv/kernel", MatrixView(0, 1, contiguous_blocks(1, (4, 4, 4)))),
    ]
    value = lambda name: np.asarray(params[name]["kernel"])
    head = {"exp_avg": value("lm_head").T, "exp_avg_sq": value("lm_head").T ** 2}
    buffers = {
        "stack/kernel": {"momentum_buffer": value("stack").transpose(0, 2, 1)},
        "conv/kernel": {"momentum_buffer": value("conv").transpose(3, 2, 0, 1)},
        "qkv/kernel": {"momentum_buffer": value("qkv").T},
        "lm_head/kernel": head,
    }
    optimizer = optax.chain(optax.clip(1.0), muon(1e-2, rules=rules))
    ours = checkpoints.from_torch(buffers, optimizer, params, rules=rules)
    for name in ("stack", "conv", "qkv"):
        chex.assert_trees_all_equal(momentum(ours).mu[name], params[name])
    chex.assert_trees_all_equal(adam(ours).mu["lm_head"], params["lm_head"])


def test_torch_states_that_do_not_fit_raise():
    params = {"dense": {"kernel": jnp.zeros((8, 12))}}
    buffer = np.zeros((12, 8), np.float32)
    with pytest.raises(
        ValueError, match=r"`dense/kernel` has shape \(8, 12\) and a torch buffer of shape \(8, 11\)"
    ):
        checkpoints.from_torch({"dense/kernel": {"momentum_buffer": np.zeros((8, 11))}}, muon(1e-2), params)
    with pytest.raises(ValueError, match=r"`layers\.0\.weight` belong to no parameter"):
        checkpoints.from_torch({"layers.0.weight": {"momentum_buffer": buffer}}, muon(1e-2), params)
    with pytest.raises(ValueError, match="no moments were found for `dense/kernel`"):
        checkpoints.from_torch({}, muon(1e-2), params)
    with pytest.raises(ValueError, match="form must be"):
        checkpoints.from_torch({}, muon(1e-2), params, form="ema")


def test_live_torch_muon_continues_here():
    torch = pytest.importorskip("torch")
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch.optim.Muon came with 2.9")
    rng = np.random.default_rng(0)
    weight = torch.nn.Parameter(torch.tensor(rng.normal(size=(12, 8)), dtype=torch.float32))
    theirs = torch.optim.Muon([weight], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    gradients = [rng.normal(size=(12, 8)).astype(np.float32) for _ in range(4)]
    params = {"dense": {"kernel": jnp.asarray(weight.detach().numpy().T)}}
    ours, state = muon(1e-2), muon(1e-2).init(params)
    for g in gradients[:3]:
        weight.grad = torch.tensor(g)
        theirs.step()
        _, state = ours.update({"dense": {"kernel": jnp.asarray(g.T)}}, state, params)
    stored = {k: v.numpy() for k, v in theirs.state_dict()["state"][0].items() if hasattr(v, "numpy")}
    params = {"dense": {"kernel": jnp.asarray(weight.detach().numpy().T.copy())}}
    taken = checkpoints.from_torch({"dense/kernel": stored}, ours, params)
    # measured 6e-8, of values up to 0.25
    chex.assert_trees_all_close(momentum(taken).mu, momentum(state).mu, rtol=1e-5, atol=1e-7)
    weight.grad = torch.tensor(gradients[3])
    theirs.step()
    updates, _ = ours.update({"dense": {"kernel": jnp.asarray(gradients[3].T)}}, taken, params)
    moved = optax.apply_updates(params, updates)["dense"]["kernel"]
    # measured 1.1e-4: torch iterates in bfloat16, steps are 2e-3
    np.testing.assert_allclose(moved, weight.detach().numpy().T, atol=2e-4)
