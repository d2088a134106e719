"""accumulate_gradients: the mean of a window, one update per window, and nothing of it in between."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_muon
from optax_muon import accumulate_gradients
from tests import matrix_products

SHAPES = {"up": {"kernel": (16, 32)}, "down": {"kernel": (32, 16)}, "norm": {"scale": (16,)}}


def muon(rate):
    return optax_muon.muon(rate, weight_decay=0.0)


def tree(seed, dtype="float32", shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda s: jnp.asarray(rng.normal(size=s), dtype), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )


def run(tx, params, gradients, jit=True):
    update = jax.jit(tx.update) if jit else tx.update
    state, out = tx.init(params), []
    for g in gradients:
        updates, state = update(g, state, params)
        out.append(updates)
        params = optax.apply_updates(params, updates)
    return out, state, params


def is_zero(updates):
    return not any(bool(jnp.any(u)) for u in jax.tree.leaves(updates))


def assert_muon_ran(updates, params):
    s = np.linalg.svd(np.asarray(updates["up"]["kernel"], np.float64), compute_uv=False)
    assert s[0] / s[-1] < 2.2


@pytest.mark.parametrize("jit", [True, False])
def test_equals_steps_on_the_mean(jit):
    gradients = [tree(i) for i in range(6)]
    means = [jax.tree.map(lambda *g: sum(g) / 3, *gradients[i : i + 3]) for i in (0, 3)]
    make = lambda: muon(1e-2)
    out, state, params = run(accumulate_gradients(make(), 3), tree(9), gradients, jit)
    expected, inner, straight = run(make(), tree(9), means)
    assert [is_zero(u) for u in out] == [True, True, False] * 2
    chex.assert_trees_all_close([out[2], out[5]], expected, rtol=1e-4, atol=1e-6)  # measured 4e-7
    chex.assert_trees_all_close(params, straight, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(state.inner_state, inner, rtol=1e-5, atol=1e-6)
    assert (int(state.micro_step), int(state.step)) == (0, 2)
    assert is_zero(state.mean)
    assert_muon_ran(out[2], params)


def test_equals_multi_steps():
    gradients = [tree(i) for i in range(4)]
    ours, _, params = run(accumulate_gradients(muon(1e-2), 2), tree(9), gradients)
    theirs, _, same = run(optax.MultiSteps(muon(1e-2), 2), tree(9), gradients)
    chex.assert_trees_all_close((ours, params), (theirs, same), rtol=1e-4, atol=1e-6)  # measured 3e-7
    assert_muon_ran(ours[1], params)


def flops(compiled):
    cost = compiled.cost_analysis()
    return (cost[0] if isinstance(cost, list) else cost)["flops"]


def test_products_sit_in_the_loop_that_is_not_entered():  # optax #320
    params, tx = tree(0), accumulate_gradients(muon(1e-2), 4)
    state = tx.init(params)
    program = jax.make_jaxpr(tx.update)(params, state, params)
    products = matrix_products.products(tx.update, params, state, params)
    assert products
    assert all("while" in product.around for product in products)
    # The loop runs while its first entry holds, which is "this is the last micro-step", and its turn clears it.
    loops = [eqn for eqn in program.eqns if eqn.primitive.name == "while"]
    assert len(loops) == 1
    # So does the compiled program: no product outside the computations that the loop calls.
    compiled = jax.jit(tx.update).lower(params, state, params).compile()
    text = compiled.as_text()
    entry = text[text.index("ENTRY") :]
    assert " while(" in entry
    assert not any(word in entry for word in (" dot(", "custom-call(", "gemm", "matmul"))
    # What a waiting micro-step computes is all that is outside the loop: compiled with an optimizer that does nothing.
    idle = optax.GradientTransformation(lambda params: muon(1e-2).init(params), lambda u, s, p=None: (u, s))
    idle = accumulate_gradients(idle, 4)
    waiting = flops(jax.jit(idle.update).lower(params, state, params).compile())
    full = flops(jax.jit(muon(1e-2).update).lower(params, state.inner_state, params).compile())
    assert waiting <= 4 * sum(p.size for p in jax.tree.leaves(params))  # measured 3 per entry
    assert waiting < 0.02 * full
    steps = optax.MultiSteps(muon(1e-2), 4)
    theirs = flops(jax.jit(steps.update).lower(params, steps.init(params), params).compile())
    assert theirs > 0.9 * full  # what every one of their micro-steps costs


def test_a_waiting_micro_step_runs_no_optimizer():
    calls = []
    count = lambda: calls.append(1)

    def update(updates, state, params=None):
        jax.debug.callback(count)
        return updates, state

    tx = accumulate_gradients(optax.GradientTransformation(lambda params: (), update), 4)
    run(tx, tree(0), [tree(i) for i in range(8)])
    jax.effects_barrier()
    assert len(calls) == 2


def test_memory():
    """In place: no second copy of the optimizer's state, and less than optax.MultiSteps needs."""
    shapes = {f"layer_{i}": {"up": {"kernel": (64, 256)}} for i in range(4)}
    params = tree(0, shapes=shapes)

    def temporaries(tx):
        program = jax.jit(tx.update, donate_argnums=(0, 1)).lower(params, tx.init(params), params)
        return program.compile().memory_analysis().temp_size_in_bytes

    size = sum(p.nbytes for p in jax.tree.leaves(params))
    ours, bare = temporaries(accumulate_gradients(muon(1e-2), 4)), temporaries(muon(1e-2))
    assert ours < bare + 1.1 * size  # measured 1.0: the means, while the optimizer works on them
    assert ours < 1.01 * temporaries(
        optax.MultiSteps(muon(1e-2), 4)
    )  # here alike; 0.67 at six layers of width 512


def test_state_is_one_gradient_tree_more():
    params, inner = tree(0), muon(1e-2)
    size = lambda t: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(t))
    more = size(jax.eval_shape(accumulate_gradients(inner, 4).init, params)) - size(inner.init(params))
    assert more == size(params) + 8


@pytest.mark.parametrize(
    ("param_dtype", "gradient_dtype"),
    [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float16", "float32")],
)
def test_dtypes_are_stable(param_dtype, gradient_dtype):  # optax #1039, #1122
    params = tree(0, param_dtype)
    tx = accumulate_gradients(muon(1e-2), 2)
    update, state = jax.jit(tx.update), tx.init(params)
    assert {m.dtype for m in jax.tree.leaves(state.mean)} == {jnp.dtype("float32")}
    for seed in range(2):
        updates, after = update(tree(seed + 1, gradient_dtype), state, params)
        chex.assert_trees_all_equal_shapes_and_dtypes((updates, after), (params, state))
        state = after
    assert update._cache_size() == 1
    assert not is_zero(updates)


def test_other_optimizers_whose_dtypes_drift():
    params, gradients = tree(0, "bfloat16"), tree(1)
    with jax.numpy_dtype_promotion("standard"):
        _, state, _ = run(accumulate_gradients(optax.adamw(1e-2), 2), params, [gradients] * 4)
    chex.assert_trees_all_equal_shapes_and_dtypes(
        state, accumulate_gradients(optax.adamw(1e-2), 2).init(params)
    )


def test_mean_in_float32_keeps_late_gradients():
    gradients = {"w": jnp.repeat(jnp.asarray([1.0, 1.0, 1.0, 2.0], jnp.bfloat16), 256)}

    def last_update(tx):
        first = {"w": gradients["w"][0]}
        _, out = jax.lax.scan(lambda s, g: tx.update(g, s)[::-1], tx.init(first), gradients)
        return float(out["w"][-1])

    assert last_update(accumulate_gradients(optax.identity(), 1024)) == 1.25
    # What a mean kept in bfloat16 loses: steps of 1/1024 round to nothing.
    assert last_update(accumulate_gradients(optax.identity(), 1024, dtype=jnp.bfloat16)) == 1.0


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("spec", [P("data", "model"), P()], ids=str)
def test_on_meshes(kind, spec):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    place = lambda t: jax.tree.map(
        lambda x: jax.device_put(x, NamedSharding(mesh, spec if x.ndim == 2 else P())), t
    )
    tx, params, gradients = accumulate_gradients(muon(1e-2), 2), tree(9), [tree(i) for i in range(4)]
    expected, _, _ = run(tx, params, gradients)
    state, params, traces = tx.init(place(params)), place(params), []
    traced = jax.jit(tx.init)(params)
    for m, t, p in zip(*map(jax.tree.leaves, (state.mean, traced.mean, params)), strict=True):
        assert m.sharding.is_equivalent_to(p.sharding, p.ndim)
        assert t.sharding.is_equivalent_to(p.sharding, p.ndim)

    @jax.jit
    def step(g, state, params):
        traces.append(1)
        updates, state = tx.update(g, state, params)
        return updates, state, optax.apply_updates(params, updates)

    out = []
    for g in gradients:
        updates, after, params = step(place(g), state, params)
        for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
            assert jax.typeof(a) == jax.typeof(b)
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        state = after
        out.append(jax.device_get(updates))
    assert len(traces) == 1
    chex.assert_trees_all_close(out, jax.device_get(expected), rtol=1e-4, atol=1e-6)  # measured 6e-7
    assert_muon_ran(expected[1], None)


def test_inside_shard_map():
    mesh = jax.make_mesh((8,), ("layer",), axis_types=(AxisType.Auto,))
    params = tree(0, shapes={"layers": {"up": {"kernel": (8, 16, 24)}}})
    tx = accumulate_gradients(optax_muon.scale_by_muon(manual_batch_axes=("layer",)), 2)
    specs = jax.tree.map(lambda x: P("layer") if x.ndim else P(), tx.init(params))
    step = jax.jit(
        jax.shard_map(
            tx.update, mesh=mesh, in_specs=(P("layer"), specs, P("layer")), out_specs=(P("layer"), specs)
        )
    )
    state = tx.init(params)
    waiting, state = step(params, state, params)
    updates, state = step(params, state, params)
    expected, _, _ = run(tx, params, [params] * 2)
    assert is_zero(waiting)
    chex.assert_trees_all_close(updates, expected[1], rtol=1e-4, atol=1e-6)  # measured 5e-7


def test_with_other_wrappers():
    params, gradients = tree(9), [tree(i) for i in range(2)]
    expected, _, _ = run(accumulate_gradients(muon(1e-2), 2), params, gradients)
    injected = accumulate_gradients(optax.inject_hyperparams(optax_muon.muon)(1e-2, weight_decay=0.0), 2)
    finite = optax.apply_if_finite(accumulate_gradients(muon(1e-2), 2), 5)
    chained = optax.chain(optax.identity(), accumulate_gradients(muon(1e-2), 2))
    for wrapped in (injected, finite, chained):
        out, _, _ = run(wrapped, params, gradients)
        chex.assert_trees_all_close(out, expected, rtol=1e-4, atol=1e-6)  # measured 4e-7
    bad = jax.tree.map(lambda g: g.at[(0,) * g.ndim].set(jnp.nan), gradients[0])
    out, _, _ = run(finite, params, [gradients[0], bad, gradients[1]])
    chex.assert_trees_all_close([out[0], out[2]], expected, rtol=1e-4, atol=1e-6)
    assert is_zero(out[1])
    # Without the wrapper it shows in the update of its window, and in no later one.
    out, state, _ = run(accumulate_gradients(optax.sgd(1.0), 2), params, [bad, *gradients, gradients[0]])
    assert is_zero(out[0])
    assert jnp.isnan(out[1]["up"]["kernel"]).any()
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves((out[2:], state)))


def test_every_as_a_schedule_and_extra_arguments():
    scaled = optax.GradientTransformationExtraArgs(
        lambda params: (), lambda u, s, p=None, *, scale, **_: (jax.tree.map(lambda x: x * scale, u), s)
    )
    tx = accumulate_gradients(scaled, lambda step: jnp.where(step < 1, 2, 3))
    params, state, seen = {"w": jnp.ones((2, 2))}, tx.init({"w": jnp.ones((2, 2))}), []
    for i in range(5):
        updates, state = jax.jit(tx.update)(params, state, params, scale=jnp.asarray(1.0 + i), unknown=None)
        seen.append(float(updates["w"][0, 0]))
    assert seen == [0.0, 2.0, 0.0, 0.0, 5.0]
    every = optax.inject_hyperparams(lambda every: accumulate_gradients(optax.sgd(1.0), every))(2)
    out, _, _ = run(every, params, [params] * 2)
    assert [is_zero(u) for u in out] == [True, False]


@pytest.mark.parametrize("jit", [True, False])
def test_leaves_that_are_not_trained(jit):
    params = tree(0) | {"steps": jnp.arange(3), "nothing": None, "hole": optax.MaskedNode()}
    gradients = tree(1) | {
        "steps": np.zeros(3, jax.dtypes.float0),
        "nothing": None,
        "hole": optax.MaskedNode(),
    }
    tx = accumulate_gradients(muon(1e-2), 2)
    state = tx.init(params)
    update = jax.jit(tx.update) if jit else tx.update
    for _ in range(2):
        updates, state = update(gradients, state, params)
    expected, _, _ = run(accumulate_gradients(muon(1e-2), 2), tree(0), [tree(1)] * 2)
    chex.assert_trees_all_close({k: updates[k] for k in SHAPES}, expected[1], rtol=1e-4, atol=1e-6)
    assert not updates["steps"].any()


def test_bad_arguments():
    for every in (0, -1, np.int64(0)):
        with pytest.raises(ValueError, match="every must be at least 1"):
            accumulate_gradients(muon(1e-2), every)
    for every in (2.0, "2", None, True):
        with pytest.raises(TypeError, match="every must be an integer"):
            accumulate_gradients(muon(1e-2), every)
    with pytest.raises(TypeError, match=r"optimizer must be an optax.GradientTransformation"):
        accumulate_gradients(1e-2, 4)
    with pytest.raises(ValueError, match="dtype must be a floating dtype"):
        accumulate_gradients(muon(1e-2), 4, dtype=jnp.int32)


def test_gradients_that_do_not_fit():  # optax #515
    tx, params = accumulate_gradients(muon(1e-2), 2), tree(0)
    state = tx.init(params)
    with pytest.raises(
        ValueError, match=r"`up/kernel` has shape \(16, 32\), but its gradient has shape \(4, 16, 32\)"
    ):
        tx.update(params | {"up": {"kernel": jnp.ones((4, 16, 32))}}, state, params)
    with pytest.raises(ValueError, match="they differ in `norm/scale`"):
        tx.update({k: v for k, v in params.items() if k != "norm"}, state, params)
