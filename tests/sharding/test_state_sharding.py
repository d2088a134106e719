"""State lies as its parameter does, made eagerly or under jit, on Auto and Explicit meshes; or cut further."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optax_muon.sharding import is_spec, like_param, reshard_like, shard_further, zeros_like_param
from tests.sharding import trees

KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
SPECS = pytest.mark.parametrize("spec", [P(), P("a"), P(None, "b"), P("b", "a"), P(("a", "b"))])


def param(kind, spec, dtype=jnp.float32):
    mesh = trees.make_mesh((4, 2), ("a", "b"), kind)
    return jax.device_put(jnp.ones((8, 16), dtype), NamedSharding(mesh, spec))


class TestLikeParam:
    @KINDS
    @SPECS
    def test_eager_and_jit(self, kind, spec):  # optax #548
        p = param(kind, spec)
        inits = (
            lambda p: like_param(jnp.full(p.shape, 2, jnp.bfloat16), p),
            lambda p: zeros_like_param(p, jnp.bfloat16),
        )
        for init, value in zip(inits, (2, 0), strict=True):
            for made in (init(p), jax.jit(init)(p)):
                assert made.sharding.is_equivalent_to(p.sharding, 2)
                assert jax.typeof(made).sharding == jax.typeof(p).sharding
                assert made.dtype == jnp.bfloat16
                assert (made == value).all()

    def test_nan_in_the_parameter_stays_there(self):
        p = param(AxisType.Auto, P("a")).at[0].set(jnp.nan)
        assert (jax.jit(lambda p: like_param(jnp.zeros(p.shape), p))(p) == 0).all()

    def test_abstract_and_plain(self):
        made = jax.eval_shape(zeros_like_param, jax.ShapeDtypeStruct((3, 4), jnp.float32))
        assert made.shape == (3, 4)
        assert zeros_like_param(jnp.ones(3)).shape == (3,)


class TestReshardLike:
    def test_explicit(self):  # maxtext #4996
        p, g = param(AxisType.Explicit, P("a")), param(AxisType.Explicit, P(("a", "b")))
        for run in (reshard_like, jax.jit(reshard_like)):
            assert jax.typeof(run(g, p)).sharding == jax.typeof(p).sharding
        assert reshard_like(p, p) is p

    def test_auto(self):
        p, g = param(AxisType.Auto, P("a")), param(AxisType.Auto, P("b"))
        assert reshard_like(g, p).sharding.is_equivalent_to(p.sharding, 2)  # concrete arrays tell
        assert jax.jit(lambda x, p: reshard_like(x, p) is x)(g, p)  # types do not
        x = jnp.ones(3)
        assert reshard_like(x, jnp.ones(3)) is x


class TestShardFurther:
    @pytest.mark.parametrize(
        ("spec", "shape", "expected"),
        [
            (P(), (8, 16), P("data", None)),
            (P(), (6, 16), P(None, "data")),
            (P("model"), (8, 16), P("model", "data")),
            (P("model"), (8, 15), P(("model", "data"), None)),
            (P("data"), (8, 16), P("data", None)),
            (P(), (3, 5), P(None, None)),
            (P(), (), P()),
        ],
    )
    def test_first_dimension_that_divides(self, spec, shape, expected):
        assert shard_further(spec, shape, ("data",), {"data": 4, "model": 2}) == expected


def test_is_spec():
    assert is_spec(P("a"))
    assert not is_spec("a")
