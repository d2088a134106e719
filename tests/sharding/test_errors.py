"""What is wrong with a mesh or a spec is said with the leaf's name and what to write instead."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optax_muon.parameters import MatrixView
from tests.sharding import trees

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def run(xs, **kwargs):
    return trees.ours(
        xs,
        views=[MatrixView((0,), (1,))] * len(xs),
        paths=["first/kernel", "second/kernel"][: len(xs)],
        **kwargs,
    )


@pytest.fixture
def mesh():
    return trees.make_mesh((4, 2), ("a", "b"), EXPLICIT)


@pytest.fixture
def auto():
    return trees.make_mesh((4, 2), ("a", "b"), AUTO)


def test_mesh_axis_that_does_not_exist(mesh):
    x = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("a")))
    with pytest.raises(ValueError, match=r"mesh_axes=\('data',\).*'data'.*\('a', 'b'\)"):
        run([x], mesh_axes=("data",))
    run([jnp.ones((8, 8))], mesh_axes=("data",))  # the same settings on one device


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (P("a", None, "b"), r"`second/kernel` has 2 axes, but its spec .* has 3 entries"),
        (P("data"), r"`second/kernel`: its spec names 'data'.*none of the mesh's axes"),
        (
            P("a", "a"),
            r"`second/kernel`: its spec cuts axis 0 and axis 1 by the same mesh axis 'a'",
        ),  # maxtext #2369
        (P(None, "a"), r"`second/kernel` has shape \(8, 6\).*cannot divide into 4"),
        ("a", r"`second/kernel`: its entry of param_specs is 'a'; write a PartitionSpec"),
    ],
)
def test_specs_that_do_not_fit(auto, spec, message):
    xs = [jax.device_put(jnp.ones(shape), NamedSharding(auto, P())) for shape in ((8, 8), (8, 6))]
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda xs: run(xs, param_specs=[P(), spec]))(xs)


def test_different_meshes(mesh):
    other = trees.make_mesh((2, 4), ("a", "b"), EXPLICIT)
    xs = [jax.device_put(jnp.ones((8, 8)), NamedSharding(m, P("a"))) for m in (mesh, other)]
    with pytest.raises(
        ValueError, match=r"`second/kernel` lies on the mesh \(a=2, b=4\), but `first/kernel` on \(a=4, b=2\)"
    ):
        run(xs)


def test_sharded_and_single_device(mesh):
    sharded = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("a")))
    alone = jax.device_put(jnp.ones((8, 8)), jax.devices()[3])
    with pytest.raises(
        ValueError,
        match=r"`second/kernel` lies on a single device, but `first/kernel` on the mesh.*device_put",
    ):
        run([sharded, alone])
    run([sharded, jnp.ones((8, 8))])  # not committed anywhere: goes where the others are
