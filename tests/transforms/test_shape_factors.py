"""The shape factors are the formulas in their names, and refuse what is no scale."""

import math

import pytest

from optax_muon import shape_factors

FORMULAS = {
    "sqrt_max": lambda m, n: math.sqrt(max(m, n)),
    "sqrt_ratio": lambda m, n: math.sqrt(n / m),
    "sqrt_ratio_min_one": lambda m, n: math.sqrt(max(1.0, n / m)),
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (7, 7)])
def test_factors(name, shape):
    value = getattr(shape_factors, name)(0.3)
    assert value.factor(*shape) == pytest.approx(0.3 * FORMULAS[name](*shape), rel=1e-12)
    assert value == getattr(shape_factors, name)(scale=0.3)
    assert hash(value) == hash(getattr(shape_factors, name)(0.3))


@pytest.mark.parametrize("name", FORMULAS)
def test_what_is_no_scale(name):
    with pytest.raises(ValueError, match=r"scale must be finite and not negative, got -0.2"):
        getattr(shape_factors, name)(-0.2)
    with pytest.raises(ValueError, match="got nan"):
        getattr(shape_factors, name)(math.nan)
    with pytest.raises(TypeError, match=r"scale must be a number.*got '0.2'"):
        getattr(shape_factors, name)("0.2")
