import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optax_muon.orthogonalization import AOL, AOL_4, KELLER, Frobenius, Orthogonalizer, Schatten
from optax_muon.orthogonalization._normalization import unit_frobenius
from tests import reference as ref
from tests.orthogonalization.spectra import apply, few

METHODS = ("newton_schulz", "gram_newton_schulz", "svd")


@few
@given(
    exponent=st.integers(-30, 30), method=st.sampled_from(METHODS), shape=st.sampled_from([(6, 9), (9, 6)])
)
def test_scale_plays_no_part_in_float32(exponent, method, shape):
    g = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    orthogonalizer = Orthogonalizer(method)
    scaled = apply(g * np.float32(10.0**exponent), orthogonalizer)
    # measured 1.9e-6 over the exponents; bound 1e-5
    np.testing.assert_allclose(scaled, apply(g, orthogonalizer), rtol=0, atol=1e-5)


# A power of two changes no digit.  # deepspeed #8533
@pytest.mark.parametrize(
    ("dtype", "powers"),
    [
        (np.float16, (-3, 12)),
        (ml_dtypes.bfloat16, (-110, 110)),
        (np.float32, (-110, 120)),
        (np.float64, (-900, 900)),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_powers_of_two_change_no_bit(dtype, powers, method, x64, rng):
    g = rng.normal(size=(5, 8)).astype(dtype)
    at_one = np.asarray(apply(g, Orthogonalizer(method)))
    assert at_one.dtype == (np.float64 if dtype == np.float64 else np.float32)
    assert abs(at_one).max() > 0.1
    for power in powers:
        scaled = (g.astype(np.float64) * 2.0**power).astype(dtype)
        np.testing.assert_array_equal(np.asarray(apply(scaled, Orthogonalizer(method))), at_one)


def test_the_largest_floats():
    x = np.full((4, 6), 3.4e38, np.float32)
    np.testing.assert_allclose(apply(x, Orthogonalizer()), apply(x / x, Orthogonalizer()), atol=1e-6)


def test_norm_is_exact(rng):
    x = rng.normal(size=(3, 40, 70)).astype(np.float32)
    ours = np.asarray(jax.jit(unit_frobenius)(jnp.asarray(x)))
    theirs = x / np.linalg.norm(x.astype(np.float64), axis=(1, 2), keepdims=True)
    np.testing.assert_allclose(ours, theirs, rtol=4e-7)  # measured 1.6e-7


# microsoft/dion #24: an all-zero gradient gave 0/0.
@pytest.mark.parametrize("normalization", ["frobenius", "schatten", "aol"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("method", METHODS)
def test_zero_stays_zero_and_leaves_its_neighbours_alone(method, dtype, normalization, rng):
    x = rng.normal(size=(3, 6, 4)).astype(dtype)
    x[1] = 0
    orthogonalizer = Orthogonalizer(method, normalization=normalization)
    ours = np.asarray(apply(x, orthogonalizer))
    assert not ours[1].any()
    alone = np.asarray(apply(x[::2], orthogonalizer))
    np.testing.assert_allclose(ours[::2], alone, rtol=0, atol=1e-6)  # measured 0
    assert abs(alone).max() > 0.1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_entries_stay_visible(method, bad, rng):
    x = rng.normal(size=(2, 5, 7)).astype(np.float32)
    x[0, 2, 3] = bad
    ours = np.asarray(apply(x, Orthogonalizer(method)))
    assert np.isnan(ours[0]).all()
    assert np.isfinite(ours[1]).all()


@pytest.mark.parametrize("method", ["newton_schulz", "gram_newton_schulz"])
@pytest.mark.parametrize("name", ["frobenius", "schatten", "aol"])
@pytest.mark.parametrize("safety", [1.0, 1.1])
def test_the_forms_against_the_reference(method, name, safety, rng, x64):
    value = {"frobenius": Frobenius, "schatten": Schatten, "aol": AOL}[name](safety)
    for coefficients in (KELLER, AOL_4):
        for shape in [(6, 10), (7, 7)]:
            x = rng.normal(size=shape)
            ours = apply(x, Orthogonalizer(method, coefficients, value))
            theirs = ref.newton_schulz_by_iteration(x, coefficients, name, safety)
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-11)  # measured 1e-13


def test_forms_by_name_are_the_values():
    assert Orthogonalizer(normalization="schatten") == Orthogonalizer(normalization=Schatten())
    assert Orthogonalizer(normalization="aol") != Orthogonalizer(normalization="frobenius")
    assert len({Frobenius(), Schatten(), AOL(), Frobenius(1.02)}) == 4


@pytest.mark.parametrize(("bad", "error"), [(0.5, ValueError), (float("inf"), ValueError), ("1", TypeError)])
def test_bad_safety(bad, error):
    with pytest.raises(error, match=r"Frobenius: safety="):
        Frobenius(bad)


@pytest.mark.parametrize("order", [(0, 3, 1, 2), (2, 1, 0, 3)])
def test_aol_keeps_permutations_and_signs(order):
    x = np.random.default_rng(1).normal(size=(4, 9)).astype(np.float32)
    signs = np.array([1, -1, -1, 1], np.float32)[:, None]
    orthogonalizer = Orthogonalizer("newton_schulz", AOL_4, "aol")
    moved = apply(signs * x[list(order)], orthogonalizer)
    np.testing.assert_allclose(moved, signs * np.asarray(apply(x, orthogonalizer))[list(order)], atol=1e-5)


def test_jitted_under_vmap_as_well(rng):
    x = jnp.asarray(rng.normal(size=(4, 5, 8)), jnp.float32)
    np.testing.assert_allclose(jax.vmap(unit_frobenius)(x), unit_frobenius(x), atol=1e-7)
