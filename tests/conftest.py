"""The hostile configuration of every test: 8 CPU devices, warnings are errors, silent promotion raises."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("MPLBACKEND", "agg")

# The shapes in the signatures are checked here and nowhere else: in the layers that handle arrays. Above them
# users come in, and a wrong argument must meet our own message.
from jaxtyping import install_import_hook

LAYERS = ("orthogonalization", "parameters", "sharding")
install_import_hook([f"optax_muon.{layer}" for layer in LAYERS], "beartype.beartype")

import jax
import numpy as np
import pytest


# The same layers use no Optax; optax.adamw and schedules promote Python floats that strict promotion refuses.
@pytest.fixture(autouse=True)
def _silent_promotion_raises(request):
    strict = request.path.parent.name in LAYERS
    with (
        jax.numpy_dtype_promotion("strict" if strict else "standard"),
        jax.numpy_rank_promotion("raise" if strict else "allow"),
    ):
        yield


@pytest.fixture(autouse=True)
def _warnings_come_once_per_test():
    from optax_muon.parameters import _paths

    _paths._SAID.clear()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield
