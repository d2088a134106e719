"""What every method must do, for any coefficients: the provable properties."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optax_muon.orthogonalization import CUBIC, DEEPSEEK_V4, KELLER, POLAR_EXPRESS, YOU, Orthogonalizer
from tests import reference as ref
from tests.matrix_products import products
from tests.orthogonalization.spectra import apply, few

# A few fixed shapes, so that each is compiled once.
shapes = st.sampled_from([(5, 1), (4, 4), (6, 13)])
seeds = st.integers(0, 2**31)
methods = st.sampled_from(["newton_schulz", "gram_newton_schulz", "svd"])
iterations = st.sampled_from(["newton_schulz", "gram_newton_schulz"])


def gaussian(seed, shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@functools.cache
def rotation(n, seed=0):
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(n, n)))[0].astype(np.float32)


@few
@given(
    shape=shapes,
    seed=seeds,
    method=iterations,
    coefficients=st.sampled_from([KELLER, YOU, CUBIC, POLAR_EXPRESS]),
)
def test_float64_is_the_scalar_map_of_the_singular_values(shape, seed, method, coefficients):
    with jax.enable_x64(True):
        g = gaussian(seed, shape).astype(np.float64)
        ours = apply(g, Orthogonalizer(method, coefficients))
    np.testing.assert_allclose(ours, ref.newton_schulz(g, coefficients), rtol=0, atol=1e-11)  # measured 3e-13


@few
@given(
    shape=shapes,
    seed=seeds,
    method=iterations,
    # On [0, 1] these stay within [0, 2], so that errors are not amplified.
    triples=st.lists(
        st.tuples(st.floats(0.5, 1.25), st.floats(-0.1, 0), st.floats(0, 0.1)), min_size=1, max_size=3
    ),
)
def test_any_coefficients(shape, seed, method, triples):
    g = gaussian(seed, shape)
    ours = Orthogonalizer(method, triples).apply(jnp.asarray(g))
    np.testing.assert_allclose(ours, ref.newton_schulz(g, triples), rtol=0, atol=1e-5)  # measured 1e-6


@few
@given(shape=shapes, seed=seeds)
def test_svd_is_the_polar_factor(shape, seed):
    g = gaussian(seed, shape)
    np.testing.assert_allclose(
        apply(g, Orthogonalizer("svd")), ref.polar_factor(g), atol=2e-5
    )  # measured 2e-6


@few
@given(shape=shapes, seed=seeds, method=methods)
def test_equivariance(shape, seed, method):
    orthogonalizer, g = Orthogonalizer(method), gaussian(seed, shape)
    ours, (m, n) = np.asarray(apply(g, orthogonalizer)), shape
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=5e-5)  # measured 6e-6
    close(apply(rotation(m) @ g @ rotation(n, 1), orthogonalizer), rotation(m) @ ours @ rotation(n, 1))
    close(apply(g[::-1, ::-1], orthogonalizer), ours[::-1, ::-1])
    close(apply(g.T, orthogonalizer), ours.T)
    close(apply(-g, orthogonalizer), -ours)


@few
@given(shape=shapes, seed=seeds, method=iterations, coefficients=st.sampled_from([KELLER, YOU, DEEPSEEK_V4]))
def test_singular_values_stay_in_the_band_of_the_scalar_map(shape, seed, method, coefficients):
    g = gaussian(seed, shape)
    relative = np.linalg.svd(g, compute_uv=False)
    relative = relative / np.linalg.norm(relative)
    band = ref.scalar_map(np.geomspace(relative.min(), 1, 10_001), coefficients)
    ours = np.linalg.svd(np.asarray(apply(g, Orthogonalizer(method, coefficients))), compute_uv=False)
    assert ours.min() >= band.min() - 1e-3
    assert ours.max() <= band.max() + 1e-3


@few
@given(seed=seeds, method=methods)
def test_zero_rows_columns_and_padding(seed, method):
    g = gaussian(seed, (4, 4))
    padded = np.zeros((6, 13), np.float32)
    padded[1:5, 3:7] = g
    ours = np.array(apply(padded, Orthogonalizer(method)))
    np.testing.assert_allclose(
        ours[1:5, 3:7], apply(g, Orthogonalizer(method)), rtol=0, atol=5e-5
    )  # measured 4e-6
    ours[1:5, 3:7] = 0
    # The vectors of LAPACK are zero there up to rounding only. measured 4.2e-6
    assert abs(ours).max() <= (2e-5 if method == "svd" else 0)


@few
@given(shape=shapes, seed=seeds, method=methods)
def test_rank_one_keeps_its_sign_and_every_update_points_downhill(shape, seed, method):
    rng = np.random.default_rng(seed)
    rank_one = np.outer(rng.normal(size=shape[0]), rng.normal(size=shape[1])).astype(np.float32)
    ours = np.asarray(apply(rank_one, Orthogonalizer(method)))
    scale = 1.0 if method == "svd" else ref.scalar_map(1.0, KELLER)
    # measured 2e-4 without a restart; bound 3e-3
    np.testing.assert_allclose(ours, scale * rank_one / np.linalg.norm(rank_one), rtol=0, atol=3e-3)
    g = gaussian(seed, shape)
    assert np.sum(g * np.asarray(apply(g, Orthogonalizer(method)))) > 0


@pytest.mark.parametrize(("shape", "rank"), [((6, 13), 6), ((13, 6), 2), ((4, 4), 3)])
def test_norm_of_the_polar_factor_is_the_root_of_the_rank(shape, rank, rng):
    g = (rng.normal(size=(shape[0], rank)) @ rng.normal(size=(rank, shape[1]))).astype(np.float32)
    ours = np.asarray(apply(g, Orthogonalizer("svd")))
    assert np.linalg.norm(ours) == pytest.approx(np.sqrt(rank), rel=1e-5)
    assert np.sqrt(np.mean(ours**2)) == pytest.approx(np.sqrt(rank / ours.size), rel=1e-5)


# marin #8621: one norm over layers and experts together.
@pytest.mark.parametrize("method", ["newton_schulz", "gram_newton_schulz", "svd"])
def test_a_stack_is_its_matrices_alone(method, rng):
    scales = np.array([[1, 1e-9, 0], [1e9, 3, 1e3]], np.float32)[:, :, None, None]
    stack = (scales * rng.normal(size=(2, 3, 11, 6))).astype(np.float32)
    orthogonalizer = Orthogonalizer(method)
    together = np.asarray(apply(stack, orthogonalizer))
    mapped = np.asarray(jax.jit(jax.vmap(jax.vmap(orthogonalizer.apply)))(stack))
    for i, j in np.ndindex(2, 3):
        alone = np.asarray(apply(stack[i, j], orthogonalizer))
        np.testing.assert_allclose(together[i, j], alone, rtol=0, atol=1e-5)  # measured 7e-7
        np.testing.assert_allclose(mapped[i, j], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("method", ["newton_schulz", "gram_newton_schulz"])
def test_narrow_arrays_are_widened_before_anything_else(method, dtype, rng):
    g = rng.normal(size=(6, 13)).astype(dtype)
    ours = apply(g, Orthogonalizer(method))
    assert ours.dtype == np.float32
    np.testing.assert_allclose(
        ours, ref.newton_schulz(g.astype(np.float64)), rtol=0, atol=5e-5
    )  # measured 3e-6


def test_cubic_steps_cost_two_products():
    def count(coefficients):
        apply = Orthogonalizer("newton_schulz", coefficients).apply
        return sum(p.times for p in products(apply, jnp.zeros((4, 6), jnp.float32)))

    assert count(KELLER) == 15
    assert count(CUBIC) == 10
