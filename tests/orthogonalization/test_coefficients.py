import pathlib

import numpy as np
import pytest

from optax_muon import orthogonalization as orth
from optax_muon.orthogonalization import Frobenius, Orthogonalizer, _coefficients, polar_express
from tests import reference as ref
from tests.orthogonalization.spectra import apply

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "data" / "peer_trajectories.npz")
FIVE_PAPER = orth.POLAR_EXPRESS[:5]

# coefficients, safety, slope at 0, band from 1e-2, band from 1e-3, p(1), largest tolerated singular value
TABLE = {
    "KELLER": (orth.KELLER, 1, 484.9, (0.6818, 1.1344), (0.4705, 1.2024), 0.6964, 1.264),
    "KELLER x10": (orth.KELLER * 2, 1, 2.35e5, (0.6818, 1.1344), (0.6818, 1.1344), 1.1253, 1.264),
    "DEEPSEEK_V4": (orth.DEEPSEEK_V4, 1, 7.93e4, (1.0, 1.0005), (1.0, 1.0005), 1.0, 1.264),
    "YOU": (orth.YOU, 1, 492.7, (0.9778, 1.0318), (0.4750, 1.1450), 0.9783, 1.325),
    "POLAR_EXPRESS, 5": (FIVE_PAPER, 1, 976, (0.8703, 1.1236), (0.8462, 1.1236), 1.0288, 1.011),
    "POLAR_EXPRESS": (orth.POLAR_EXPRESS, 1, 6363, (1.0, 1.0), (1.0, 1.0), 1.0, 1.011),
    "POLAR_EXPRESS_5": (orth.POLAR_EXPRESS_5, 1.02, 970, (0.8589, 1.1411), (0.8466, 1.1411), 0.9035, 1.042),
    "CANS": (orth.CANS, 1, 1049, (0.8844, 1.1198), (0.8844, 1.1198), 1.0051, 1.0),
    "CUBIC": (orth.CUBIC, 1, 119, (0.7741, 1.3), (0.1191, 1.3), 0.7741, 1.0035),
    "AOL_4": (orth.AOL_4, 1, 147, (0.9409, 1.05), (0.1466, 1.05), 0.9438, 1.104),
}


@pytest.mark.parametrize("name", TABLE)
def test_what_the_sets_do_to_a_singular_value(name):
    coefficients, safety, slope, band_2, band_3, at_one, tolerated = TABLE[name]
    assert np.prod([a for a, _, _ in coefficients]) / safety == pytest.approx(slope, rel=4e-3)
    for low, band in [(1e-2, band_2), (1e-3, band_3)]:
        p = ref.scalar_map(np.geomspace(low, 1, 200_001) / safety, coefficients)
        assert (p.min(), p.max()) == pytest.approx(band, abs=6e-5)
    assert ref.scalar_map(1 / safety, coefficients) == pytest.approx(at_one, abs=6e-5)
    # Up to there it stays positive and within the band of [0, 1]; a little beyond it does not (CUBIC changes
    # its sign).
    top = 1.001 * ref.scalar_map(np.linspace(0, 1, 100_001) / safety, coefficients).max()
    with np.errstate(over="ignore", invalid="ignore"):
        inside = ref.scalar_map(np.linspace(1, 0.9995 * tolerated, 10_001) / safety, coefficients)
        beyond = ref.scalar_map(np.linspace(1, 1.005 * tolerated, 10_001) / safety, coefficients)
    assert inside.min() > 0 or tolerated == 1
    assert inside.max() <= top
    assert not (beyond.min() > 0 and beyond.max() <= top)


# What the publisher of each golden set adds to the norm: ours adds nothing.
GOLDEN_SETS = {
    "kj5": (orth.KELLER, 1, 1e-7),
    "you5": (orth.YOU, 1, 1e-7),
    "pe5_modded": (orth.POLAR_EXPRESS_5, 1.02, 1e-6),
    "pe5_gns105": (orth.GRAM_NEWTON_SCHULZ_5, 1, 1e-7),
    "pe8_101": (orth.POLAR_EXPRESS, 1, 0),
    "cans5": (orth.CANS, 1, 0),
    "cubic5": (orth.CUBIC, 1, 0),
    "deepseekv4_10": (orth.DEEPSEEK_V4, 1, 0),
    "track3_12": (orth.TRACK_3, 1, 0),
}


@pytest.mark.parametrize("shape", ["tall", "wide", "square"])
@pytest.mark.parametrize("name", GOLDEN_SETS)
def test_published_iterations_in_float64(name, shape, x64):
    coefficients, safety, epsilon = GOLDEN_SETS[name]
    g, theirs = GOLDEN[f"in/g/{shape}"][0], GOLDEN[f"ns64/{name}/{shape}"]
    exact = ref.newton_schulz(g, coefficients, safety=safety, epsilon=epsilon)
    np.testing.assert_allclose(exact, theirs, rtol=0, atol=1e-12)  # measured 2.2e-13
    for method in ("newton_schulz", "gram_newton_schulz"):
        orthogonalizer = Orthogonalizer(method, coefficients, Frobenius(safety=safety))
        ours = apply(g.astype(np.float64), orthogonalizer)
        # measured 1e-14 without, 1.1e-6 with a publisher's epsilon; bounds 1e-12 and 2e-6
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6 if epsilon else 1e-12)


def test_generator_recomputes_the_published_lists():
    ours = np.array(polar_express(8))
    # measured 3.9e-9: the paper's list carries that much rounding; bound 1e-8
    np.testing.assert_allclose(ours, _coefficients._POLAR_EXPRESS_UNSAFE, rtol=0, atol=1e-8)
    ours = np.array(polar_express(5, safety=2e-2, cushion=2e-2))
    np.testing.assert_allclose(ours, orth.POLAR_EXPRESS_5, rtol=0, atol=1e-13)  # measured 1.2e-14


@pytest.mark.parametrize("steps", [1, 2, 4, 7, 12])
@pytest.mark.parametrize("lower", [1e-5, 1e-2, 0.3, 0.999])
def test_generated_sets_converge_and_never_cross_zero(steps, lower):
    coefficients = polar_express(steps, lower=lower, cushion=0.0)
    p = ref.scalar_map(np.geomspace(lower, 1, 10_001), coefficients)
    assert len(coefficients) == steps
    assert p.min() > 0
    # Equioscillation: the values at the two ends lie symmetrically around 1 within the band.
    assert p.max() - 1 == pytest.approx(1 - p.min(), abs=1e-6)
    longer = ref.scalar_map(
        np.geomspace(lower, 1, 10_001), polar_express(steps + 1, lower=lower, cushion=0.0)
    )
    assert abs(longer - 1).max() <= abs(p - 1).max() + 1e-12


@pytest.mark.parametrize(
    "bad",
    [
        {"steps": 0},
        {"lower": 0.0},
        {"lower": 1.0},
        {"safety": -0.1},
        {"safety": float("nan")},
        {"cushion": 1.0},
    ],
)
def test_generator_refuses_numbers_out_of_range(bad):
    (name,) = bad
    with pytest.raises(ValueError, match=f"polar_express: {name}="):
        polar_express(**{"steps": 5, **bad})


def test_a_set_that_reverses_a_rank_one_gradient_is_followed_exactly():
    # The four-step set of Turbo-Muon's first version under plain Frobenius normalisation maps 1 to -0.99.
    reversing = (
        (4.0098, -7.0585, 2.4635),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    )
    x = np.outer(np.arange(1.0, 5), np.arange(1.0, 7)).astype(np.float32)
    ours = np.asarray(apply(x, Orthogonalizer("newton_schulz", reversing)))
    assert np.sum(ours * x) < 0
    assert ref.scalar_map(1.0, reversing) == pytest.approx(-0.99, abs=5e-3)
    np.testing.assert_allclose(ours, ref.newton_schulz(x, reversing), atol=1e-5)
    # None of ours does that.
    for name in TABLE:
        assert TABLE[name][5] > 0
