"""Whole matrices on one owner: the result of every mesh, layout and mode equals the plain loop on one device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optax_muon.parameters import MatrixView
from optax_muon.sharding import _buckets
from tests import tpu_topology
from tests.sharding import trees

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


@pytest.fixture(scope="module")
def want():
    xs = trees.leaves()
    result = trees.loop(xs)
    before, after = (np.linalg.svd(np.asarray(x[0]), compute_uv=False) for x in (xs, result))
    assert after.max() / after.min() < 0.6 * before.max() / before.min()  # it is Muon that is compared
    return result


class TestOneDevice:
    def test_eager_and_jit_equal_the_loop(self, want):
        xs = trees.leaves()
        assert trees.error(trees.ours(xs), want) < 1e-5  # measured 9.8e-7
        assert trees.error(jax.jit(trees.ours)(xs), want) < 1e-5  # measured 9.8e-7

    @pytest.mark.parametrize("chunk", [1, 3, 64])
    def test_chunks_change_nothing(self, want, chunk):
        got = jax.jit(lambda xs: trees.ours(xs, chunk=lambda m, n: chunk))(trees.leaves())
        assert trees.error(got, want) < 1e-5  # measured 1.1e-6

    def test_one_body_per_matrix_shape(self):
        # optax_muon compiles one loop per shape, whatever the number of leaves. google-research #2270
        def dots(count):
            xs = [jnp.ones((16, 32))] * count + [jnp.ones((32, 16))] * count + [jnp.ones((count, 16, 16))]
            views = [MatrixView((0,), (1,))] * 2 * count + [MatrixView((1,), (2,))]
            run = jax.jit(
                lambda xs: trees.ours(xs, views=views, paths=[str(i) for i in range(2 * count + 1)])
            )
            return len(re.findall(r"stablehlo.dot_general", run.lower(xs).as_text()))

        assert dots(24) == dots(4) > 0

    def test_blocks_join_the_matrices_of_their_shape(self):
        qkv, view = jnp.ones((16, 48)), trees.VIEWS[trees.PATHS.index("gate_up")]
        view = MatrixView((0,), (1,), view.blocks[0].__class__(1, (16, 16, 16)))
        run = jax.jit(lambda xs: trees.ours(xs, views=[view, MatrixView((0,), (1,))], paths=["qkv", "o"]))
        text = run.lower([qkv, jnp.ones((16, 16))]).as_text()
        alone = jax.jit(lambda xs: trees.ours(xs, views=[MatrixView((0,), (1,))], paths=["o"]))
        assert (
            text.count("dot_general") == alone.lower([jnp.ones((16, 16))]).as_text().count("dot_general") > 0
        )

    def test_dtypes(self):
        xs = [jnp.ones((4, 8), dtype) for dtype in (jnp.bfloat16, jnp.float16, jnp.float32)]
        got = trees.ours(xs, views=[MatrixView((0,), (1,))] * 3, paths=list("abc"))
        assert [y.dtype for y in got] == [jnp.float32] * 3

    def test_wire_dtype_rounds_without_a_mesh_too(self):
        x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8)), jnp.float32)
        one = {"views": [MatrixView((0,), (1,))], "paths": ["w"]}
        (rounded,) = trees.ours([x], wire_dtype=jnp.bfloat16, **one)
        (by_function,) = trees.ours([x], wire_dtype=lambda dtype: jnp.bfloat16, **one)
        (before,) = trees.ours([x.astype(jnp.bfloat16).astype(jnp.float32)], **one)
        assert (rounded == before.astype(jnp.bfloat16).astype(jnp.float32)).all()
        assert (rounded == by_function).all()

    def test_zero_sized_and_no_leaves(self):
        assert trees.ours([], views=[], paths=[]) == []
        (y,) = trees.ours([jnp.ones((0, 4, 8))], views=[MatrixView((1,), (2,))], paths=["w"])
        assert y.shape == (0, 4, 8)

    def test_zero_stays_zero_and_nan_stays_in_its_matrix(self):
        x = (
            jnp.asarray(np.random.default_rng(0).normal(size=(3, 4, 8)), jnp.float32)
            .at[0]
            .set(0)
            .at[1, 0, 0]
            .set(jnp.nan)
        )
        (y,) = trees.ours([x], views=[MatrixView((1,), (2,))], paths=["w"])
        assert (y[0] == 0).all()
        assert jnp.isnan(y[1]).any()
        assert jnp.isfinite(y[2]).all()


MESHES = {
    "1": ((1,), ("a",)),
    "2": ((2,), ("a",)),
    "3": ((3,), ("a",)),
    "4": ((4,), ("a",)),
    "8": ((8,), ("a",)),
    "4x2": ((4, 2), ("a", "b")),
    "2x2x2": ((2, 2, 2), ("a", "b", "c")),
}


def on_mesh(mesh_name, kind, layout):
    """(leaves on the mesh, their specs, names of the mesh's first and last axis)."""
    shape, names = MESHES[mesh_name]
    mesh = trees.make_mesh(shape, names, kind)
    sizes = dict(zip(names, shape, strict=True))
    a, b = (names[0], names[1]) if len(names) > 1 else (names[0], names[0])
    specs = trees.mixed_layout(sizes, a, b) if layout == "mixed" else trees.layout(layout, sizes, a, b)
    return trees.put(trees.leaves(), specs, mesh), specs


class TestMeshes:
    @pytest.mark.parametrize("layout", trees.LAYOUTS)
    def test_explicit_layouts(self, want, layout):  # optax #1660, PaddleFleet #1704, deepspeed #8437
        xs, _ = on_mesh("4x2", EXPLICIT, layout)
        step = jax.jit(lambda xs: trees.ours(xs))
        got = step(xs)
        assert trees.error(got, want) < 1e-5  # measured 1.1e-6
        assert [jax.typeof(y).sharding for y in got] == [jax.typeof(x).sharding for x in xs]
        step(got)
        assert step._cache_size() == 1

    @pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
    @pytest.mark.parametrize("mesh", MESHES)
    def test_mixed_layouts_on_every_mesh(self, want, mesh, kind):
        xs, specs = on_mesh(mesh, kind, "mixed")
        got = jax.jit(lambda xs: trees.ours(xs, param_specs=specs))(xs)
        assert trees.error(got, want) < 1e-5  # measured 1.1e-6
        assert all(y.sharding.is_equivalent_to(x.sharding, x.ndim) for x, y in zip(xs, got, strict=True))

    @pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
    def test_eager(self, want, kind):
        xs, _ = on_mesh("4x2", kind, "mixed")  # nothing said: concrete arrays tell
        got = trees.ours(xs)
        assert trees.error(got, want) < 1e-5  # measured 1.1e-6
        assert all(y.sharding.is_equivalent_to(x.sharding, x.ndim) for x, y in zip(xs, got, strict=True))


class TestAutoMeshWhereNobodyTells:
    @pytest.mark.parametrize("layout", [*trees.LAYOUTS, "mixed"])
    def test_equals_the_loop_and_lies_as_before(self, want, layout):
        xs, _ = on_mesh("4x2", AUTO, layout)
        mu = [0 * x for x in xs]

        @jax.jit
        def step(ps, mu):  # everything that comes out depends on what went in, as in an optimizer
            mu = [0.5 * m + p for m, p in zip(mu, ps, strict=True)]
            return mu, trees.ours(mu)

        new_mu, got = step(xs, mu)
        assert trees.error(got, want) < 1e-5  # measured 1.1e-6
        for x, m, y in zip(xs, new_mu, got, strict=True):
            assert m.sharding.is_equivalent_to(x.sharding, x.ndim)
            assert y.sharding.is_equivalent_to(x.sharding, x.ndim)


def small(count=5, dtype=jnp.float32, seed=1):
    """A short tree for tests of where, not of what: {tall, wide} matrices."""
    rng = np.random.default_rng(seed)
    xs = [jnp.asarray(rng.normal(size=(8, 16) if i % 2 else (16, 8)), dtype) for i in range(count)]
    return xs, [MatrixView((0,), (1,))] * count, [f"layer_{i}/kernel" for i in range(count)]


def run_small(xs, **kwargs):
    _, views, paths = small(len(xs))
    return trees.ours(xs, views=views, paths=paths, **kwargs)


class TestManualAxes:
    """Inside the user's own pmap and shard_map."""

    def test_pmap(self):
        xs, views, _ = small()
        want = trees.loop(xs, views)
        copies = [jnp.stack([x] * 4) for x in xs]
        got = jax.pmap(run_small)(copies)
        assert trees.error([y[3] for y in got], want) < 1e-5  # measured 3e-7

    def test_pmap_axis_name_divides_the_matrices(self):
        xs, views, _ = small(8)
        want = trees.loop(xs, views)
        copies = [jnp.stack([x] * 4) for x in xs]
        divided = jax.pmap(lambda xs: run_small(xs, pmap_axis_name="replica"), axis_name="replica")
        got = divided(copies)
        for replica in range(4):
            assert trees.error([y[replica] for y in got], want) < 1e-5  # measured 3e-7

        def flops(**kwargs):
            mapped = jax.pmap(lambda xs: run_small(xs, chunk=lambda m, n: 64, **kwargs), axis_name="replica")
            return mapped.lower(copies).compile().cost_analysis()["flops"]

        assert flops(pmap_axis_name="replica") < 0.35 * flops()  # measured 0.26

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_shard_map_of_replicated_leaves(self, check_vma):
        xs, views, _ = small()
        mesh = trees.make_mesh((4, 2), ("a", "b"), EXPLICIT)
        xs = trees.put(xs, [P()] * len(xs), mesh)
        mapped = jax.shard_map(run_small, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=check_vma)
        assert trees.error(jax.jit(mapped)(xs), trees.loop(xs, views)) < 1e-5  # measured 3e-7

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_shard_map_divides_replicated_leaves(self, check_vma):
        xs, views, _ = small(8)
        mesh = trees.make_mesh((4, 2), ("a", "b"), EXPLICIT)
        xs = trees.put(xs, [P()] * len(xs), mesh)

        def local(xs):
            return run_small(xs, pmap_axis_name="a")

        mapped = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=check_vma)
        assert trees.error(jax.jit(mapped)(xs), trees.loop(xs, views)) < 1e-5  # measured 3e-7

    def test_a_shard_raises_and_names_the_leaf(self):  # deepspeed #8437, moonlight #27
        xs, _, _ = small()
        mesh = trees.make_mesh((4, 2), ("a", "b"), EXPLICIT)
        specs = [P()] * 4 + [P("a", None)]
        mapped = jax.shard_map(run_small, mesh=mesh, in_specs=(specs,), out_specs=specs)
        with pytest.raises(
            ValueError, match=r"`layer_4/kernel` varies over the manual mesh axis 'a'.*manual_batch_axes"
        ):
            jax.jit(mapped)(trees.put(xs, specs, mesh))

    def test_manual_batch_axes(self):  # warp #1851
        mesh = trees.make_mesh((4, 2), ("a", "b"), EXPLICIT)
        x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4, 6)), jnp.float32)
        w, views = jnp.ones((4, 6)), [MatrixView((1,), (2,)), MatrixView((0,), (1,))]

        def local(x, w):
            return tuple(trees.ours([x, w], views=views, paths=["layers", "w"], manual_batch_axes=("a",)))

        specs = (P("a"), P())
        mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs))
        got = mapped(*trees.put([x, w], specs, mesh))
        assert trees.error(got, trees.loop([x, w], views)) < 1e-5  # measured 3e-7

    @pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
    def test_partly_manual(self, kind):
        xs, views, _ = small()
        mesh = trees.make_mesh((4, 2), ("a", "b"), kind)
        specs = [P(None, "b")] * len(xs)

        def local(xs):
            return run_small(xs, param_specs=specs)

        mapped = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"a"})
        got = jax.jit(mapped)(trees.put(xs, specs, mesh))
        assert trees.error(got, trees.loop(xs, views)) < 1e-5  # measured 3e-7


class TestOptions:
    @pytest.mark.parametrize("mesh_axes", [(), ("a",), ("b",)], ids=str)
    @pytest.mark.parametrize("layout", ["both", "minor", "replicated"])
    def test_mesh_axes(self, layout, mesh_axes):
        # An axis that is left out takes no share; where it cuts a matrix its pieces are still brought together.
        xs, views, _ = small()
        specs = {"both": P("a", "b"), "minor": P(None, "b"), "replicated": P()}[layout]
        mesh = trees.make_mesh((4, 2), ("a", "b"), EXPLICIT)
        got = jax.jit(lambda xs: run_small(xs, mesh_axes=mesh_axes))(trees.put(xs, [specs] * len(xs), mesh))
        assert trees.error(got, trees.loop(xs, views)) < 1e-5  # measured 3e-7

    @pytest.mark.parametrize("told", [True, False], ids=["told", "untold"])
    def test_mesh_of_auto_and_explicit_axes(self, told):
        xs, views, _ = small()
        mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AUTO, EXPLICIT))
        specs = [P("a", "b"), P("b", "a"), P(None, ("b", "a")), P(), P("b", None)]
        placed = trees.put(xs, specs, mesh)
        got = jax.jit(lambda xs: run_small(xs, param_specs=specs if told else None))(placed)
        assert trees.error(got, trees.loop(xs, views)) < 1e-5  # measured 3e-7
        assert [jax.typeof(y).sharding for y in got] == [jax.typeof(x).sharding for x in placed]
        if told:  # untold, what the Auto axis cuts is the compiler's choice
            assert all(y.sharding.is_equivalent_to(x.sharding, 2) for x, y in zip(placed, got, strict=True))

    def test_arrays_made_inside_the_step_have_no_mesh(self):
        xs, views, _ = small(2)
        mesh = trees.make_mesh((4, 2), ("a", "b"), EXPLICIT)
        placed = jax.device_put(xs[0], NamedSharding(mesh, P("a", "b")))
        got = jax.jit(lambda x: run_small([x, jnp.asarray(np.asarray(xs[1]))]))(placed)
        assert trees.error(got, trees.loop(xs, views)) < 1e-5  # measured 3e-7

    def test_specs_bring_the_mesh(self):
        # Uncommitted arrays under jit(in_shardings=) carry no mesh; NamedShardings do.
        xs, views, _ = small()
        place = [NamedSharding(trees.make_mesh((4, 2), ("a", "b"), AUTO), P("a", "b"))] * len(xs)
        step = jax.jit(lambda xs: run_small(xs, param_specs=place), in_shardings=(place,))
        got = step(xs)
        assert trees.error(got, trees.loop(xs, views)) < 1e-5  # measured 3e-7
        assert "all-to-all" in step.lower(xs).compile().as_text()

    def test_donated(self):
        xs, views, _ = small()
        want = trees.loop(xs, views)
        mesh = trees.make_mesh((4, 2), ("a", "b"), EXPLICIT)
        placed = trees.put(xs, [P("a", "b")] * len(xs), mesh)
        got = jax.jit(run_small, donate_argnums=0)(placed)
        assert trees.error(got, want) < 1e-5  # measured 3e-7

    def test_vmap(self):
        xs, views, _ = small()
        got = jax.jit(jax.vmap(run_small))([jnp.stack([x, 3 * x]) for x in xs])
        assert trees.error([y[1] for y in got], trees.loop(xs, views)) < 1e-5  # measured 3e-7

    def test_a_change_of_specs_is_another_program_and_not_another_result(self):
        xs, views, _ = small()
        mesh = trees.make_mesh((4, 2), ("a", "b"), EXPLICIT)
        step = jax.jit(lambda xs: run_small(xs))
        for spec in (P("a"), P(None, "a"), P("a")):
            assert trees.error(step(trees.put(xs, [spec] * len(xs), mesh)), trees.loop(xs, views)) < 1e-5
        assert step._cache_size() == 2


class TestRounds:
    def test_a_stack_longer_than_one_exchange(self, monkeypatch):
        monkeypatch.setattr(_buckets, "ROUND_BYTES", 4 * 8 * 16)  # a row of units
        mesh = trees.make_mesh((4, 2), ("a", "b"), EXPLICIT)
        views = [MatrixView((1,), (2,)), MatrixView((0,), (1,)), MatrixView((1,), (0,))]
        rng = np.random.default_rng(0)
        xs = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((19, 8, 16), (8, 16), (16, 8))]
        specs = [P(None, "a", None), P("a"), P(None, "a")]
        placed = trees.put(xs, specs, mesh)
        step = jax.jit(lambda xs: trees.ours(xs, views=views, paths=["l", "w", "t"], mesh_axes=("a",)))
        assert trees.error(step(placed), trees.loop(xs, views)) < 1e-5  # measured 3e-7
        found = list(tpu_topology.collectives(step.lower(placed).compile().as_text()))
        assert {c.kind for c in found} == {"all-to-all"}
        assert {c.depth for c in found} == {1}


class TestProgram:
    def test_nothing_moves_but_in_the_exchange(self):
        xs, _, _ = small()
        mesh = trees.make_mesh((4, 2), ("a", "b"), EXPLICIT)
        placed = trees.put(xs, [P("a", "b")] * len(xs), mesh)
        found = list(tpu_topology.collectives(jax.jit(run_small).lower(placed).compile().as_text()))
        assert [(c.kind, c.depth) for c in found] == [("all-to-all", 0)] * 4  # tall and wide, in and out

    def test_replicas_gather_each_result_once(self):
        xs, _, _ = small(8)
        placed = trees.put(xs, [P()] * 8, trees.make_mesh((8,), ("a",), EXPLICIT))
        found = list(tpu_topology.collectives(jax.jit(run_small).lower(placed).compile().as_text()))
        assert [(c.kind, c.bytes) for c in found] == [("all-gather", 8 * 8 * 16 * 4)]

    def test_local_experts_do_not_move(self):  # PaddleFleet #1704
        mesh = trees.make_mesh((8,), ("expert",), EXPLICIT)
        x = jax.device_put(jnp.ones((8, 16, 24)), NamedSharding(mesh, P("expert")))
        step = jax.jit(lambda x: trees.ours([x], views=[MatrixView((1,), (2,))], paths=["experts"]))
        assert not list(tpu_topology.collectives(step.lower(x).compile().as_text()))
