"""The update RMS is exact for every matrix of a leaf, whatever the rank of its gradient."""

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
    renormalize,
    scale_by_muon,
    scale_by_shape,
    shape_factors,
)
from tests import reference as ref

STACK = [Rule(".*", MatrixView(-2, -1))]


def step(transformation, update):
    params = {"dense": {"kernel": update}}
    return transformation.update(params, transformation.init(params), params)[0]["dense"]["kernel"]


def low_rank(shape, rank, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(shape[0], rank)) @ rng.normal(size=(rank, shape[1])), jnp.float32)


def rms(x):
    return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


@pytest.mark.parametrize("shape", [(64, 32), (32, 64), (48, 48)])
@pytest.mark.parametrize("rank", [1, 4, 32])
def test_rms_is_nominal_for_every_rank(shape, rank):
    gradient = low_rank(shape, rank)
    factor = scale_by_shape(shape_factors.sqrt_max(0.2))
    exact = step(optax.chain(scale_by_muon(), renormalize(), factor), gradient)
    assert abs(rms(exact) / 0.2 - 1) < 1e-5  # measured 2e-7
    plain = step(optax.chain(scale_by_muon(), factor), gradient)
    assert rms(plain) < 0.2 * 0.95  # what it is there for
    # Only the length changes. measured 4e-7
    expected = ref.renormalized(np.asarray(plain, np.float64), 0.2)
    np.testing.assert_allclose(exact, expected, rtol=0, atol=1e-6)


def test_each_slice_and_each_block_alone():  # marin #8621, dion #114
    stack = jnp.stack([low_rank((12, 16), r) * 10.0**r for r in (1, 3, 9)])
    together = step(renormalize(rules=STACK), stack)
    for i in range(3):
        np.testing.assert_allclose(together[i], step(renormalize(), stack[i]), rtol=1e-6)
    view = MatrixView(0, 1, contiguous_blocks(1, (8, 4, 4)))
    blocks = step(renormalize(rules=[Rule(".*", view)]), stack[2])
    for cut in (np.s_[:, :8], np.s_[:, 8:12], np.s_[:, 12:]):
        np.testing.assert_allclose(blocks[cut], step(renormalize(), stack[2][cut]), rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_zeros_stay_zero_and_dtypes_stay(dtype):
    update = jnp.stack([low_rank((8, 8), 2), jnp.zeros((8, 8))]).astype(dtype)
    got = step(renormalize(rules=STACK), update)
    assert got.dtype == dtype
    assert not jnp.any(got[1])
    assert abs(rms(got[0]) * 8**0.5 - 1) < 5e-3  # measured 1.1e-3 in bfloat16


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("blocks", [None, contiguous_blocks(2, 8)], ids=["whole", "blocks"])
def test_one_device_equals_a_mesh(axis_type, blocks):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(axis_type,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec(None, "x", "y"))
    update = jnp.stack([low_rank((16, 32), r) for r in (2, 7)])
    transformation = renormalize(rules=[Rule(".*", MatrixView(1, 2, blocks))])
    with jax.set_mesh(mesh):
        got = jax.jit(lambda u: step(transformation, u))(jax.device_put(update, sharding))
        if axis_type == AxisType.Explicit:
            assert got.sharding.is_equivalent_to(sharding, 3)
    np.testing.assert_allclose(np.asarray(got), step(transformation, update), rtol=2e-6)


def test_refuses_what_is_no_matrix():
    with pytest.raises(ValueError, match="renormalize takes matrices only"):
        renormalize().update({"bias": jnp.ones(3)}, optax.EmptyState(), {"bias": jnp.ones(3)})
