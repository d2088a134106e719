"""What every public transformation must do, one table for all of them."""

import dataclasses
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_muon
from optax_muon import recipes


@dataclasses.dataclass(frozen=True)
class Case:
    make: Callable[[], optax.GradientTransformation]
    matrices_only: bool = False
    orthogonal: bool = True


CASES = {
    "muon": Case(lambda: optax_muon.muon(1e-2)),
    "muon_schedule": Case(lambda: optax_muon.muon(optax.linear_schedule(1e-2, 0.0, 10))),
    "muon_optax_nesterov": Case(lambda: optax_muon.muon(1e-2, nesterov="optax")),
    "muon_bf16_momentum": Case(lambda: optax_muon.muon(1e-2, mu_dtype=jnp.bfloat16)),
    "keller": Case(recipes.keller),
    "torch": Case(recipes.torch),
    "moonlight": Case(recipes.moonlight),
    "scale_by_muon": Case(optax_muon.scale_by_muon, matrices_only=True),
    "scale_by_shape": Case(optax_muon.scale_by_shape, matrices_only=True, orthogonal=False),
}
ON_MESHES = ("muon", "muon_optax_nesterov", "scale_by_shape")  # the others differ from these by numbers alone
PAIRS = [(p, g) for p in ("float32", "bfloat16", "float16") for g in ("float32", "bfloat16", "float16")]
MESHES = {
    "none": None,
    "explicit": ((4, 2), AxisType.Explicit),
    "auto": ((4, 2), AxisType.Auto),
}
LAYOUTS = {
    "nowhere": None,
    "rows": P("data"),
    "columns": P(None, "model"),
    "both": P("data", "model"),
    "replicated": P(),
}


def make_params(case: Case, dtype="float32", sharding: Callable | None = None):
    rng = np.random.default_rng(0)
    shapes = {"up": {"kernel": (16, 32)}, "down": {"kernel": (32, 16)}}
    if not case.matrices_only:
        shapes |= {"embed": {"embedding": (8, 16)}, "norm": {"scale": (16,)}}
    params = jax.tree.map(
        lambda s: jnp.asarray(rng.normal(size=s), dtype), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )
    if sharding is not None:
        params = jax.tree.map(lambda x: jax.device_put(x, sharding(x)), params)
    return params


def make_gradients(params, seed=1):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda p: jax.device_put(jnp.asarray(rng.normal(size=p.shape), p.dtype), p.sharding), params
    )


def typeof(tree):
    return jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x), str(jax.typeof(x).sharding.spec)), tree)


def assert_muon_ran(case: Case, gradients, updates):
    """The singular values of a Muon update lie in one narrow band; those of the gradient do not."""
    if case.orthogonal:
        s = np.linalg.svd(np.asarray(updates["up"]["kernel"], np.float64), compute_uv=False)
        raw = np.linalg.svd(np.asarray(gradients["up"]["kernel"], np.float64), compute_uv=False)
        assert s[0] / s[-1] < 2.2 < raw[0] / raw[-1]


@pytest.fixture(params=CASES, name="case")
def _case(request):
    return CASES[request.param]


@pytest.fixture(params=MESHES, name="mesh")
def _mesh(request):
    if MESHES[request.param] is None:
        return None
    sizes, kind = MESHES[request.param]
    return jax.make_mesh(sizes, ("data", "model"), axis_types=(kind,) * 2)


def place(mesh, spec):
    """A sharding for each leaf: the spec for matrices, replicated for the rest."""
    return None if mesh is None else lambda x: NamedSharding(mesh, spec if x.ndim == 2 else P())


def no_decay(tree):
    return jax.tree.map(lambda p: p * 0, tree)


def test_init_is_abstract_and_state_is_congruent(case):
    params, tx = make_params(case), case.make()
    concrete = tx.init(params)
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    chex.assert_trees_all_equal_shapes_and_dtypes(jax.eval_shape(tx.init, params), concrete)
    chex.assert_trees_all_equal_shapes_and_dtypes(jax.eval_shape(tx.init, shapes), concrete)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_types_are_stable_and_muon_ran(name, mesh, layout):
    if (mesh is None) != (layout == "nowhere") or (mesh is not None and name not in ON_MESHES):
        pytest.skip("not a row of the table")
    case = CASES[name]
    params, tx = make_params(case, sharding=place(mesh, LAYOUTS[layout])), case.make()
    gradients = make_gradients(params)
    alone = jax.tree.map(jnp.asarray, jax.device_get(params))
    expected, _ = jax.jit(tx.update)(jax.device_get(gradients), tx.init(alone), alone)
    for init, update in ((tx.init, tx.update), (jax.jit(tx.init), jax.jit(tx.update))):
        state = init(params)
        updates, new_state = update(gradients, state, params)
        chex.assert_trees_all_equal(typeof(state), typeof(new_state))
        chex.assert_trees_all_equal(typeof(updates), typeof(params))
        shardings = jax.tree.map(
            lambda u, p: u.sharding.is_equivalent_to(p.sharding, u.ndim), updates, params
        )
        assert mesh is None or all(jax.tree.leaves(shardings))
        assert_muon_ran(case, gradients, jax.tree.map(jnp.subtract, updates, tx_decay(tx, params)))
        # measured 6e-7 over all rows of this table; bound 1e-5
        chex.assert_trees_all_close(jax.device_get(updates), jax.device_get(expected), rtol=1e-5, atol=1e-6)


def tx_decay(tx, params):
    """The part of an update that decay makes: the update of a zero gradient."""
    zeros = jax.tree.map(jnp.zeros_like, params)
    return tx.update(zeros, tx.init(params), params)[0]


def test_second_call_does_not_recompile(case):
    params, tx = make_params(case), case.make()
    gradients, state, traces = make_gradients(params), case.make().init(params), []

    @jax.jit
    def step(params, state):
        traces.append(1)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(3):
        params, state = step(params, state)
    assert len(traces) == 1
    assert step._cache_size() == 1


def test_unknown_extra_arguments_are_accepted(case):
    params, tx = make_params(case), case.make()
    gradients = make_gradients(params)
    updates, _ = optax.with_extra_args_support(tx).update(
        gradients, tx.init(params), params, value=1.0, anything=None
    )  # optax #1131
    assert_muon_ran(case, gradients, jax.tree.map(jnp.subtract, updates, tx_decay(tx, params)))


@pytest.mark.parametrize(("param_dtype", "gradient_dtype"), PAIRS)
def test_dtypes_never_drift(case, param_dtype, gradient_dtype):  # optax #1122, flax #924, NorMuon #10
    params, tx = make_params(case, param_dtype), case.make()
    gradients = jax.tree.map(lambda g: g.astype(gradient_dtype), make_gradients(params))
    state = tx.init(params)
    updates, new_state = tx.update(gradients, state, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, new_state)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, gradients if case.matrices_only else params)
    assert all(bool(jnp.all(jnp.isfinite(u))) for u in jax.tree.leaves(updates))


def test_zero_gradients_are_finite(case):
    params, tx = make_params(case), case.make()
    updates, state = tx.update(no_decay(params), tx.init(params), params)
    assert all(bool(jnp.all(jnp.isfinite(u))) for u in jax.tree.leaves((updates, state)))
    if case.matrices_only:
        assert all(not jnp.any(u) for u in jax.tree.leaves(updates))


def test_empty_tree_and_holes(case):
    tx = case.make()
    for empty in ({}, {"a": None}, {"a": optax.MaskedNode()}):
        updates, _ = tx.update(empty, tx.init(empty), empty)
        assert jax.tree.structure(updates) == jax.tree.structure(empty)
    params = make_params(case)
    gradients = make_gradients(params)
    holes = lambda t: t | {"frozen": None, "masked": optax.MaskedNode()}  # equinox #681
    updates, _ = tx.update(holes(gradients), tx.init(holes(params)), holes(params))
    expected, _ = tx.update(gradients, tx.init(params), params)
    chex.assert_trees_all_equal({k: updates[k] for k in expected}, expected)


def test_optax_wrappers(case):
    params = make_params(case)
    gradients = make_gradients(params)
    expected, _ = case.make().update(gradients, case.make().init(params), params)
    mask = jax.tree.map(lambda _: True, params)
    wrappers = {
        "apply_if_finite": optax.apply_if_finite(case.make(), 3),
        "masked": optax.masked(case.make(), mask),  # optax #271
        "partition": optax.partition({"t": case.make()}, jax.tree.map(lambda _: "t", params)),
        "multi_steps": optax.MultiSteps(case.make(), 1),
    }
    for wrapped in wrappers.values():
        updates, state = jax.jit(wrapped.update)(gradients, wrapped.init(params), params)
        # measured 3e-7 (eager against jit); bound 1e-5
        chex.assert_trees_all_close(updates, expected, rtol=1e-5, atol=1e-6)
        if isinstance(wrapped, optax.GradientTransformation):
            mapped = optax.tree.map_params(wrapped, lambda s: s + 1, state)
            chex.assert_trees_all_equal_structs(mapped, state)


def test_not_finite_steps_leave_no_trace(case):  # optax #1746
    params, tx = make_params(case), optax.apply_if_finite(case.make(), 10)
    good, state = make_gradients(params), None
    bad = jax.tree.map(lambda g: g.at[(0,) * g.ndim].set(jnp.nan), good)
    _, state = tx.update(good, tx.init(params), params)
    updates, after = tx.update(bad, state, params)
    chex.assert_trees_all_equal(after.inner_state, state.inner_state)
    assert all(not jnp.any(u) for u in jax.tree.leaves(updates))
    straight, _ = tx.update(good, state, params)
    resumed, _ = tx.update(good, after, params)
    chex.assert_trees_all_equal(straight, resumed)
    unwrapped, _ = case.make().update(bad, case.make().init(params), params)
    assert jnp.isnan(unwrapped["up"]["kernel"]).any()  # never a silent zero


def test_donated_buffers(case):
    params, tx = make_params(case), case.make()
    gradients, state = make_gradients(params), tx.init(params)
    expected = tx.update(gradients, state, params)
    donated = jax.jit(tx.update, donate_argnums=(0, 1))(
        jax.tree.map(jnp.array, gradients), jax.tree.map(jnp.array, state), params
    )
    chex.assert_trees_all_close(donated, expected, rtol=1e-5, atol=1e-6)  # measured 3e-7


@pytest.mark.parametrize(
    "factory", [optax_muon.muon, lambda learning_rate: recipes.keller(learning_rate)], ids=["muon", "recipe"]
)
def test_inject_hyperparams_constructs_without_help(factory):  # optax #1532
    case = Case(lambda: factory(1e-2))
    params = make_params(case)
    injected, bare = optax.inject_hyperparams(factory)(1e-2), factory(1e-2)
    state, plain = injected.init(params), bare.init(params)
    for seed in range(3):
        gradients = make_gradients(params, seed)
        updates, state = jax.jit(injected.update)(gradients, state, params)
        expected, plain = jax.jit(bare.update)(gradients, plain, params)
        # measured 4e-7: the rate becomes an argument, and XLA orders the products otherwise; bound 1e-5
        chex.assert_trees_all_close(updates, expected, rtol=1e-5, atol=1e-7)
    assert_muon_ran(case, gradients, jax.tree.map(jnp.subtract, updates, tx_decay(bare, params)))
    state.hyperparams["learning_rate"] = jnp.asarray(0.0)
    updates, _ = injected.update(gradients, state, params)
    assert all(not jnp.any(u) for u in jax.tree.leaves(updates["up"]))
