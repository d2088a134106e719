"""Whole matrices on one owner: the result of every mesh, layout and mode equals the plain loop on one device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from optax_muon.parameters import MatrixView
from tests.sharding import trees

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


@pytest.fixture(scope="module")
def want():
    result = trees.loop(trees.leaves())
    singular = np.linalg.svd(np.asarray(result[0]), compute_uv=False)
    assert singular.min() > 0.3  # it is Muon that is compared: the Gaussian was far from orthogonal
    assert singular.max() < 1.3
    return result


def collectives(text):
    names = "all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute"
    return sorted(re.findall(rf"= \S+(?:, [^=]*)? ({names})(?:-start)?\(", text))


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
        assert (rounded == before.astype(jnp.bfloat16)).all()
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
