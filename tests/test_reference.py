"""The NumPy reference against numbers that other packages' own code gave: the oracle is itself checked."""

import pathlib

import numpy as np
import pytest

from tests import reference as ref

GOLDEN = np.load(pathlib.Path(__file__).parent / "data" / "peer_trajectories.npz")
POLAR_EXPRESS_5 = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
PE = {"coefficients": POLAR_EXPRESS_5, "safety": 1.02}

# Numbers of each run, and a bound on the distance relative to the movement of the weights over the four
# steps.
RUNS = {
    # float32 iterations. measured 7.8e-7; bound 2e-6
    "EO_Muon_fp32_quintic_spectral_nonesterov": (
        {"factor": ref.sqrt_max(1), "nesterov": None, "coefficients": ref.YOU},
        2e-6,
    ),
    "EO_Muon_fp32_simple_shape_nesterov": ({"factor": ref.sqrt_ratio_min_one}, 2e-6),
    "EO_Muon_fp32_simple_rms02_nesterov": ({}, 2e-6),
    # These round to bfloat16 inside. measured 1.1e-2 (torch) to 2.5e-2; bound 4e-2
    "KJ_SingleDeviceMuon": ({"factor": ref.sqrt_ratio_min_one}, 4e-2),
    "Moonlight": ({}, 4e-2),
    "torch213_original": ({"factor": ref.sqrt_ratio_min_one}, 2e-2),
    "torch213_match_rms_adamw": ({}, 2e-2),
    "torch213_original_nonesterov": ({"factor": ref.sqrt_ratio_min_one, "nesterov": None}, 2e-2),
    "pytorch_optimizer41_Muon": ({"factor": ref.sqrt_ratio_min_one}, 2e-2),
    "pytorch_optimizer41_Muon_adjusted": ({}, 2e-2),
    "dionMuon_NSyou_nesterov_spectral": ({"factor": ref.sqrt_ratio, "coefficients": ref.YOU}, 2e-2),
    # Polar Express in bfloat16. measured 2.6e-2 to 3.4e-2; bound 5e-2
    "dionMuon_default_PE_spectral": ({"factor": ref.sqrt_ratio, "nesterov": None, **PE}, 5e-2),
    "dionMuon_PE_rms_cwd": ({"nesterov": None, "cautious": True, **PE}, 5e-2),
    "dionNorMuon_default_PE_spectral": (
        {"factor": ref.sqrt_ratio, "nesterov": None, "normuon_beta2": 0.95, **PE},
        5e-2,
    ),
    "modded_NorMuon": (
        {
            "factor": ref.sqrt_ratio_min_one,
            "learning_rate": 0.023,
            "weight_decay": 1.2 * 0.023,
            "cautious": True,
            "normuon_beta2": 0.9,
            "normuon_variant": "modded",
            **PE,
        },
        5e-2,
    ),
}


@pytest.mark.parametrize("shape", ["tall", "wide", "square"])
@pytest.mark.parametrize("package", RUNS)
def test_reference_follows_the_packages_own_trajectories(package, shape):
    numbers, bound = RUNS[package]
    start, gradients = GOLDEN[f"in/w0/{shape}"], GOLDEN[f"in/g/{shape}"]
    theirs = GOLDEN[f"opt/{package}/{shape}"].astype(np.float64)
    ours = ref.muon_trajectory(start, gradients, **{"learning_rate": 0.02, "layout": "oi", **numbers})
    assert np.linalg.norm(ours - theirs) <= bound * np.linalg.norm(theirs - start)


def test_layouts_are_transposes_of_each_other():
    w, g = GOLDEN["in/w0/tall"], GOLDEN["in/g/tall"]
    numbers = {"learning_rate": 0.1, "factor": ref.sqrt_ratio, "normuon_beta2": 0.95}
    oi = ref.muon_trajectory(w, g, layout="oi", **numbers)
    io = ref.muon_trajectory(w.T, g.swapaxes(1, 2), layout="io", **numbers)
    np.testing.assert_allclose(io.swapaxes(1, 2), oi, rtol=0, atol=1e-13)


@pytest.mark.parametrize("normalization", ["frobenius", "schatten"])
def test_spectral_form_is_the_iteration(normalization, rng):
    for shape in [(5, 9), (9, 5), (6, 6), (1, 4)]:
        g = rng.normal(size=shape)
        spectral = ref.newton_schulz(g, normalization=normalization, safety=1.01)
        iterated = ref.newton_schulz_by_iteration(g, normalization=normalization, safety=1.01)
        np.testing.assert_allclose(iterated, spectral, rtol=0, atol=1e-13)


def test_averaging_and_summing_momentum_give_the_same_updates(rng):
    state, total = ref.muon_init(np.zeros((4, 6))), np.zeros((4, 6))
    for g in rng.normal(size=(5, 4, 6)):
        m, u = ref.momentum_step(state, g, 0.95, "torch")
        total, v = ref.sum_momentum_step(total, g, 0.95)
        np.testing.assert_allclose(0.05 * total, m, atol=1e-15)
        np.testing.assert_allclose(ref.newton_schulz(u), ref.newton_schulz(v), atol=1e-13)
        state = ref.MuonState(state.count + 1, m)
