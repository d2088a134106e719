"""NorMuon against the float64 reference; every matrix of a leaf alone; zero-safe, dtype-stable, on meshes."""

import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optax_muon import (
    MatrixView,
    Rule,
    contiguous_blocks,
    interleaved_blocks,
    scale_by_muon,
    scale_by_normuon,
)
from tests import reference as ref

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "data" / "peer_trajectories.npz")


def run(transformation, gradients):
    """The updates for a sequence of gradients of one kernel."""
    params = {"dense": {"kernel": jnp.zeros_like(gradients[0])}}
    state, out = transformation.init(params), []
    for g in gradients:
        updates, state = transformation.update({"dense": {"kernel": g}}, state, params)
        out.append(updates["dense"]["kernel"])
    return out, state


def updates_like(shape, count=4, seed=0):
    return list(jnp.asarray(np.random.default_rng(seed).normal(size=(count, *shape)) * 0.1, jnp.float32))


@pytest.mark.parametrize("shape", ["tall", "wide", "square"])
@pytest.mark.parametrize(("over", "variant"), [("fan_in", "paper"), ("short_side", "modded")])
def test_follows_the_reference(shape, over, variant):
    gradients = [jnp.asarray(g.T) for g in GOLDEN[f"in/g/{shape}"]]
    got, state = run(scale_by_normuon(beta2=0.9, over=over, epsilon=1e-10), gradients)
    second = np.zeros((1, 1))
    for g, u in zip(gradients, got, strict=True):
        expected, second = ref.normuon(np.asarray(g, np.float64), second, beta2=0.9, variant=variant)
        # measured 3e-7; bound 1e-6
        np.testing.assert_allclose(u, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
    nu = state.nu["dense"]["kernel"]
    assert nu.shape == second.shape  # one number per neuron
    np.testing.assert_allclose(nu, second, rtol=1e-5)


@pytest.mark.parametrize("over", ["fan_in", "short_side"])
def test_a_slice_of_a_stack_equals_the_slice_alone(over):  # marin #8621
    stack = updates_like((2, 3, 8, 12))
    stack = [u.at[:, 1].multiply(1000.0) for u in stack]
    rules = [Rule(".*", MatrixView(-2, -1))]
    together, _ = run(scale_by_normuon(over=over, rules=rules), stack)
    for i, j in np.ndindex(2, 3):
        alone, _ = run(scale_by_normuon(over=over), [u[i, j] for u in stack])
        chex.assert_trees_all_close([u[i, j] for u in together], alone, rtol=1e-6)  # measured 2e-7


@pytest.mark.parametrize(
    ("view", "blocks"),
    [
        (MatrixView(0, 1, contiguous_blocks(1, (8, 4, 4))), [np.s_[:, :8], np.s_[:, 8:12], np.s_[:, 12:]]),
        (MatrixView(0, 1, contiguous_blocks(0, 4)), [np.s_[4 * i : 4 * i + 4] for i in range(3)]),
        (MatrixView(0, 1, interleaved_blocks(1, 2)), [np.s_[:, ::2], np.s_[:, 1::2]]),
        (
            MatrixView(
                0, 1, (contiguous_blocks(1, 8), contiguous_blocks(1, (2, 6)), contiguous_blocks(0, 6))
            ),
            [np.s_[r : r + 6, c : c + n] for r in (0, 6) for c, n in ((0, 2), (2, 6), (8, 2), (10, 6))],
        ),
    ],
    ids=["gqa", "rows", "interleaved", "nested"],
)
def test_blocks_equal_separate_parameters(view, blocks):  # dion #90, #114
    whole = updates_like((12, 16))
    together, _ = run(scale_by_normuon(rules=[Rule(".*", view)]), whole)
    for block in blocks:
        alone, _ = run(scale_by_normuon(), [u[block] for u in whole])
        chex.assert_trees_all_close([u[block] for u in together], alone, rtol=1e-6)  # measured 2e-7


def test_heads_count_as_outputs():
    kernels = updates_like((16, 4, 6))
    heads, state = run(scale_by_normuon(rules=[Rule(".*", MatrixView(0, (1, 2)))]), kernels)
    flat, _ = run(scale_by_normuon(), [u.reshape(16, 24) for u in kernels])
    assert state.nu["dense"]["kernel"].shape == (1, 4, 6)
    chex.assert_trees_all_close([u.reshape(16, 24) for u in heads], flat, rtol=1e-6)


def test_the_norm_is_kept_and_neurons_are_equalised():
    (update,) = updates_like((16, 32), count=1)
    update = update * jnp.logspace(-3, 3, 32)
    (scaled,), _ = run(scale_by_normuon(), [update])
    np.testing.assert_allclose(jnp.linalg.norm(scaled), jnp.linalg.norm(update), rtol=1e-5)
    rms = jnp.sqrt(jnp.mean(scaled**2, 0))
    np.testing.assert_allclose(rms, rms[0], rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("over", ["fan_in", "short_side"])
def test_zeros_stay_zero_and_dtypes_stay(dtype, over):  # dion #24, Emerging-Optimizers #254, NorMuon #10
    gradients = [u.astype(dtype).at[1].set(0) for u in updates_like((3, 8, 8))]
    gradients[1] = jnp.zeros_like(gradients[1])
    got, state = run(scale_by_normuon(over=over, rules=[Rule(".*", MatrixView(-2, -1))]), gradients)
    for g, u in zip(gradients, got, strict=True):
        assert u.dtype == dtype
        assert jnp.all(jnp.isfinite(u))
        assert not jnp.any(u[1])
        assert jnp.any(u[0]) == jnp.any(g[0])
    assert state.nu["dense"]["kernel"].dtype == jnp.float32


def test_nan_stays_in_its_matrix():
    (update,) = updates_like((3, 8, 8), count=1)
    (got,), _ = run(
        scale_by_normuon(rules=[Rule(".*", MatrixView(-2, -1))]), [update.at[1, 0, 0].set(jnp.nan)]
    )
    assert jnp.all(jnp.isnan(got[1]))
    assert jnp.all(jnp.isfinite(got[jnp.array([0, 2])]))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [(None, "x", None), (None, None, "x"), (None, "x", "y"), ("x", "y", None)])
@pytest.mark.parametrize("blocks", [None, contiguous_blocks(2, 8)], ids=["whole", "blocks"])
def test_one_device_equals_a_mesh(axis_type, spec, blocks):  # dion #114
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(axis_type,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    stack = updates_like((2, 16, 32), count=3)
    transformation = scale_by_normuon(rules=[Rule(".*", MatrixView(1, 2, blocks))])
    expected, _ = run(transformation, stack)
    with jax.set_mesh(mesh):
        params = {"dense": {"kernel": jax.device_put(jnp.zeros((2, 16, 32)), sharding)}}
        state = jax.jit(transformation.init)(params)
        update = jax.jit(transformation.update)
        for u, e in zip(stack, expected, strict=True):
            before = jax.tree.map(jax.typeof, state)
            updates, state = update({"dense": {"kernel": jax.device_put(u, sharding)}}, state, params)
            assert jax.tree.map(jax.typeof, state) == before
            got = updates["dense"]["kernel"]
            if axis_type == AxisType.Explicit:
                assert got.sharding.is_equivalent_to(sharding, 3)
            np.testing.assert_allclose(np.asarray(got), e, rtol=2e-6)


def test_refuses_what_it_cannot_do():
    params = {"dense": {"kernel": jnp.ones((6, 10))}}
    mixed = [Rule(".*", MatrixView(0, 1, contiguous_blocks(1, (8, 2))))]
    with pytest.raises(ValueError, match="`dense/kernel` has blocks that are tall and blocks that are wide"):
        scale_by_normuon(over="short_side", rules=mixed).init(params)
    with pytest.raises(ValueError, match=r"beta2 must lie in \[0, 1\)"):
        scale_by_normuon(beta2=1.0)
    with pytest.raises(ValueError, match="over must be one of 'fan_in', 'short_side'"):
        scale_by_normuon(over="rows")
    with pytest.raises(ValueError, match="scale_by_normuon takes matrices only"):
        scale_by_normuon().init({"bias": jnp.ones(3)})


def test_in_a_chain_after_muon_it_really_acts():
    gradients = [jnp.asarray(g.T) for g in GOLDEN["in/g/tall"]]
    plain, _ = run(scale_by_muon(), gradients)
    scaled, _ = run(optax.chain(scale_by_muon(), scale_by_normuon()), gradients)
    s = np.linalg.svd(np.asarray(plain[0], np.float64), compute_uv=False)
    assert s.min() > 0.6  # Muon ran
    assert s.max() < 1.25
    for a, b in zip(plain, scaled, strict=True):
        assert not np.allclose(a, b, rtol=1e-2)
        np.testing.assert_allclose(np.linalg.norm(a), np.linalg.norm(b), rtol=1e-5)
