"""The memory that Muon saves on models people name: byte counts, the arithmetic behind the claims, the planner."""

import importlib
import math
import pathlib
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType

import optax_muon

EXAMPLES = str(pathlib.Path(__file__).parent.parent / "examples")
GIB = 2**30


@pytest.fixture(scope="module")
def plan():
    sys.path.insert(0, EXAMPLES)
    yield importlib.import_module("plan_pod")
    sys.path.remove(EXAMPLES)


@pytest.fixture(scope="module")
def models(plan):
    return sys.modules["published_models"].MODELS


# (share of the parameters on Muon, state saved against AdamW); measured, and what the shapes say
SAVED = {
    "Qwen2.5-3B": (0.899, 0.450),
    "Moonlight-16B-A3B": (0.958, 0.479),
    "Kimi-K2": (0.998, 0.499),
    "GLM-5": (0.999, 0.499),
    "DeepSeek-V4-Pro": (0.999, 0.499),
}


@pytest.mark.parametrize("name", SAVED)
def test_state_of_muon_against_adamw(plan, models, name):
    params = models[name]()
    muon, adamw = plan.RECIPES[name](1e-3), optax.adamw(1e-3)
    share, saved = SAVED[name]
    rows = optax_muon.describe(params, muon).rows
    total = sum(math.prod(r.shape) for r in rows)
    on_muon = sum(math.prod(r.shape) for r in rows if r.label == "muon")
    assert abs(on_muon / total - share) < 1e-3
    both = plan.state_bytes(muon, params), plan.state_bytes(adamw, params)
    assert abs(1 - both[0] / both[1] - saved) < 1e-3
    # To the byte: one momentum where AdamW keeps two moments, and a counter or two.
    counters = 3 * 4
    assert both[1] == 2 * 4 * total + 4
    assert 0 <= both[0] - (4 * on_muon + 2 * 4 * (total - on_muon)) <= counters


@pytest.mark.parametrize("chips", [1, 8, 64])
@pytest.mark.parametrize(("dtype", "size"), [(jnp.float32, 4), (jnp.bfloat16, 2)])
def test_qwen_per_device(plan, models, chips, dtype, size):
    """2.775 of 3.086 billion parameters keep one number instead of two: 1.29 GiB per device over 8 in float32."""
    params = models["Qwen2.5-3B"](dtype)
    mesh = AbstractMesh((chips,), ("data",), axis_types=(AxisType.Explicit,))
    placed = sys.modules["published_models"].place(params, mesh)
    adamw, muon = plan.per_chip(optax.adamw(1e-3), placed), plan.per_chip(optax_muon.muon(1e-3), placed)
    expected = 2.775e9 * size / chips / GIB
    assert abs((adamw - muon) / GIB / expected - 1) < 2e-3  # 10.34, 1.292 and 0.162 GiB in float32
    if chips == 8 and size == 4:
        assert abs((adamw - muon) / GIB - 1.29) < 0.005


def test_the_report_says_it_all(plan, models):
    text = plan.report(
        "Kimi-K2",
        models["Kimi-K2"](),
        plan.RECIPES["Kimi-K2"],
        "v5p:8x8x16",
        {"data": 64, "model": 16},
        False,
    )
    for needle in (
        "99.8% of 1,026.41B",
        "69,668 matrices",
        "49.9% less",
        "1024 chips",
        "per chip",
        "exchange",
    ):
        assert needle in text, text


def test_a_model_of_ones_own(plan, tmp_path, monkeypatch, capsys):
    (tmp_path / "my_model.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "def shapes():\n"
        "    return {'dense': {'kernel': jax.ShapeDtypeStruct((128, 64), jnp.float32)}}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["plan_pod", "--params", "my_model:shapes", "--mesh", "data=8"])
    plan.main()
    assert "1 matrices (1 of 128 x 64" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["plan_pod", "--params", "my_model"])
    with pytest.raises(SystemExit, match="write module:function"):
        plan.main()


def test_nothing_is_allocated(plan, models):
    before = {id(x) for x in jax.live_arrays()}
    plan.state_bytes(optax_muon.muon(1e-3), models["Kimi-K2"]())
    assert sum(x.nbytes for x in jax.live_arrays() if id(x) not in before) < 1e6
