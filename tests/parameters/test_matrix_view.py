"""A view turns a leaf into its matrices and back, exactly; blocks equal separate leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optax_muon.parameters import (
    MatrixShape,
    MatrixView,
    contiguous_blocks,
    from_matrices,
    interleaved_blocks,
    to_matrices,
)


# Strategies draw plain numbers and the tests build the values: the shape checker draws random items itself.
def cuts(axis: int):
    sizes = st.lists(st.integers(1, 3), min_size=1, max_size=5).map(tuple)
    contiguous = st.builds(
        lambda s, r: (contiguous_blocks, (axis, s, r), sum(s) * r), sizes, st.integers(1, 3)
    )
    width = st.builds(
        lambda w, n: (contiguous_blocks, (axis, w), w * n), st.integers(1, 3), st.integers(0, 3)
    )
    interleaved = st.builds(
        lambda c, n: (interleaved_blocks, (axis, c), c * n), st.integers(1, 3), st.integers(0, 3)
    )
    return st.one_of(contiguous, width, interleaved)


@st.composite
def leaves(draw):
    """(shape, arguments of the view): ranks 2 to 5, any order of axes, up to two cuts on different axes."""
    ndim = draw(st.integers(2, 5))
    order = draw(st.permutations(range(ndim)))
    n_in = draw(st.integers(1, ndim - 1))
    n_out = draw(st.integers(1, ndim - n_in))
    reduction, output = tuple(order[:n_in]), tuple(order[n_in : n_in + n_out])
    shape = [draw(st.integers(0, 3)) for _ in range(ndim)]
    made = []
    for axis in draw(st.lists(st.sampled_from(reduction + output), max_size=2, unique=True)):
        make, args, shape[axis] = draw(cuts(axis))
        made.append((make, args))
    shift = ndim if draw(st.booleans()) else 0
    return tuple(shape), tuple(a - shift for a in reduction), tuple(a - shift for a in output), made


def build(leaf):
    shape, reduction, output, made = leaf
    return shape, MatrixView(reduction, output, tuple(make(*args) for make, args in made) or None)


@settings(max_examples=40, deadline=None)
@given(leaves())
def test_round_trip_is_exact(leaf):
    shape, view = build(leaf)
    x = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    mats = to_matrices(jnp.asarray(x), view)
    assert [y.shape for y in mats] == [(s.count, s.fan_in, s.fan_out) for s in view.matrix_shapes(shape)]
    assert sum(y.size for y in mats) == x.size
    np.testing.assert_array_equal(from_matrices(mats, view, shape), x)


@settings(max_examples=12, deadline=None)
@given(leaves())
def test_unbatched_view_sees_the_same_matrices(leaf):
    shape, view = build(leaf)
    view = view.resolve(shape)
    assert view.resolve(shape) == view
    batch = view.batch_axes(len(shape))
    inner = tuple(n for axis, n in enumerate(shape) if axis not in batch)
    x = jnp.arange(np.prod(shape, dtype=int)).reshape(shape)
    moved = jnp.moveaxis(x, batch, tuple(range(len(batch)))).reshape(
        np.prod([shape[a] for a in batch], dtype=int), *inner
    )
    each = [to_matrices(row, view.unbatched(len(shape))) for row in moved]
    for i, together in enumerate(to_matrices(x, view)):
        if each:
            np.testing.assert_array_equal(together, jnp.concatenate([mats[i] for mats in each]))


def test_axes_of_a_matrix_are_taken_in_the_order_given():
    x = jnp.arange(2 * 3 * 4).reshape(2, 3, 4)
    np.testing.assert_array_equal(to_matrices(x, MatrixView((1, 2), 0))[0][0], x.reshape(2, 12).T)
    np.testing.assert_array_equal(
        to_matrices(x, MatrixView((2, 1), 0))[0][0], x.transpose(2, 1, 0).reshape(12, 2)
    )


def test_fused_qkv_equals_three_kernels(rng):  # microsoft/dion #90, InternLM/xtuner #2030
    q, k, v = (rng.normal(size=(6, n)) for n in (8, 4, 4))
    view = MatrixView(0, 1, contiguous_blocks(1, (8, 4, 4)))
    a, b = to_matrices(jnp.asarray(np.concatenate([q, k, v], 1)), view)
    np.testing.assert_array_equal(a, jnp.asarray(q)[None])
    np.testing.assert_array_equal(b, jnp.asarray(np.stack([k, v])))
    assert view.matrix_shapes((6, 16)) == (MatrixShape(1, 6, 8), MatrixShape(2, 6, 4))


def test_sectioned_and_grouped_orders_give_the_same_matrices(rng):
    # deepspeedai/DeepSpeed #8580: the same heads, [Q | K | V] or per query group [q q k v][q q k v].
    groups, per_group, d, head = 3, 2, 5, 4
    q = rng.normal(size=(d, groups, per_group, head))
    k, v = rng.normal(size=(2, d, groups, 1, head))
    sectioned = jnp.asarray(np.concatenate([x.reshape(d, -1) for x in (q, k, v)], 1))
    grouped = jnp.asarray(np.concatenate([q, k, v], 2).reshape(d, -1))
    sizes = (per_group * head, head, head)
    whole_sectioned = MatrixView(0, 1, contiguous_blocks(1, tuple(groups * s for s in sizes)))
    whole_grouped = MatrixView(0, 1, contiguous_blocks(1, sizes, repeats=groups))
    heads = contiguous_blocks(1, head)
    for cut in (None, heads):
        views = [
            MatrixView(0, 1, v.blocks if cut is None else (v.blocks, cut))
            for v in (whole_sectioned, whole_grouped)
        ]
        for a, b in zip(
            *(to_matrices(x, v) for x, v in zip((sectioned, grouped), views, strict=True)), strict=True
        ):
            np.testing.assert_array_equal(a, b)
    (per_head,) = to_matrices(grouped, views[1])
    assert per_head.shape == (groups * (per_group + 2), d, head)
    np.testing.assert_array_equal(
        per_head[: groups * per_group], jnp.asarray(q.reshape(d, -1, head).transpose(1, 0, 2))
    )


def test_heads_inside_a_flat_axis_equal_a_head_axis(rng):  # microsoft/dion #62
    x = jnp.asarray(rng.normal(size=(6, 3, 4)))
    for flat, view, split in (
        (x.reshape(6, 12), MatrixView(0, 1, contiguous_blocks(1, 4)), MatrixView(0, 2)),
        (x.reshape(6, 12), MatrixView(0, 1, contiguous_blocks(1, (4,) * 3)), MatrixView(0, 2)),
        (x.reshape(6, 12).T, MatrixView(0, 1, contiguous_blocks(0, 4)), None),
    ):
        (a,) = to_matrices(flat, view)
        b = to_matrices(x, split)[0] if split else to_matrices(x, MatrixView(2, 0))[0]
        np.testing.assert_array_equal(a, b)


def test_mla_projections(rng):
    heads, nope, rope, v = 3, 4, 2, 5
    up = jnp.asarray(rng.normal(size=(7, heads, nope + v)))
    k_part, v_part = to_matrices(
        up.reshape(7, -1), MatrixView(0, 1, contiguous_blocks(1, (nope, v), repeats=heads))
    )
    np.testing.assert_array_equal(k_part[0], up[..., :nope].reshape(7, -1))
    np.testing.assert_array_equal(v_part[0], up[..., nope:].reshape(7, -1))
    per_head = MatrixView(0, 1, contiguous_blocks(1, (nope, v) * heads))
    k_heads, v_heads = to_matrices(up.reshape(7, -1), per_head)
    np.testing.assert_array_equal(k_heads, up[..., :nope].transpose(1, 0, 2))
    np.testing.assert_array_equal(v_heads, up[..., nope:].transpose(1, 0, 2))
    down = MatrixView(0, 1, contiguous_blocks(1, (8, rope)))
    assert down.matrix_shapes((7, 10)) == (MatrixShape(1, 7, 8), MatrixShape(1, 7, 2))


def test_gate_and_up(rng):  # NVIDIA/Megatron-LM #7077
    gate, up = jnp.asarray(rng.normal(size=(2, 3, 6, 4)))  # three experts
    for fused, blocks in (
        (jnp.concatenate([gate, up], -1), contiguous_blocks(-1, (4, 4))),
        (jnp.stack([gate, up], -1).reshape(3, 6, 8), interleaved_blocks(-1, 2)),
    ):
        (mats,) = to_matrices(fused, MatrixView(-2, -1, blocks))
        np.testing.assert_array_equal(mats, jnp.stack([gate, up], 1).reshape(6, 6, 4))


def test_four_unequal_blocks_and_a_sum_that_is_wrong():  # NVIDIA/Megatron-LM #4731
    blocks = contiguous_blocks(1, (20, 20, 3, 3))
    assert MatrixView(0, 1, blocks).matrix_shapes((8, 46)) == (MatrixShape(2, 8, 20), MatrixShape(2, 8, 3))
    with pytest.raises(ValueError, match=r"`a/qkv/kernel` has shape \(8, 48\).*sum to 46, the axis has 48"):
        MatrixView(0, 1, blocks).resolve((8, 48), "a/qkv/kernel")


def test_a_shard_that_is_not_whole_heads_raises():  # deepspeedai/DeepSpeed #8384
    view = MatrixView(0, 1, contiguous_blocks(1, 128))
    assert view.matrix_shapes((64, 256)) == (MatrixShape(2, 64, 128),)
    with pytest.raises(ValueError, match="192 is no multiple of 128"):
        view.resolve((64, 192), "q")


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (MatrixView(0, 3), r"`p` has shape \(2, 3, 4\).*names axis 3"),
        (MatrixView(0, -3), "names an axis twice"),
        (MatrixView((0, 1), 1), "names an axis twice"),
        (MatrixView(0, 1, contiguous_blocks(2, 2)), "cuts a batch axis"),
        (MatrixView(0, 1, interleaved_blocks(1, 2)), "3 is no multiple of 2"),
        (
            MatrixView(0, 1, contiguous_blocks(1, (1, 1), repeats=2)),
            "times 2 repeats sum to 4, the axis has 3",
        ),
    ],
)
def test_views_that_do_not_fit_name_the_leaf(view, message):
    with pytest.raises(ValueError, match=message):
        view.resolve((2, 3, 4), "p")


def test_bad_values_raise_at_construction():
    with pytest.raises(ValueError, match="reduction_axes is empty"):
        MatrixView((), 0)
    with pytest.raises(TypeError, match="output_axes"):
        MatrixView(0, (True,))
    with pytest.raises(ValueError, match="at least one size"):
        contiguous_blocks(0, ())
    with pytest.raises(ValueError, match="at least 1"):
        contiguous_blocks(0, (4, 0))
    with pytest.raises(ValueError, match="at least 1"):
        interleaved_blocks(0, 0)


def test_equal_blocks_are_reshapes_not_slices():
    def count(view):
        text = str(jax.make_jaxpr(lambda x: to_matrices(x, view))(jnp.zeros((4, 64))))
        return text.count("slice["), text.count("concatenate[")

    assert count(MatrixView(0, 1, contiguous_blocks(1, (4,) * 16))) == (0, 0)
    assert count(MatrixView(0, 1, contiguous_blocks(1, (8, 8), repeats=4))) == (0, 0)
    assert count(MatrixView(0, 1, interleaved_blocks(1, 4))) == (0, 0)
    assert count(MatrixView(0, 1, contiguous_blocks(1, (3, 5) * 8))) == (2, 0)


def test_views_are_values():
    assert hash(MatrixView(0, (1,))) == hash(MatrixView(0, [1]))
    view = MatrixView(0, 1, [contiguous_blocks(1, (2, 2), repeats=2), interleaved_blocks(1, 2)])
    assert str(view) == (
        "MatrixView(reduction_axes=0, output_axes=1, blocks=(contiguous_blocks(1, (2, 2), repeats=2), "
        "interleaved_blocks(1, 2)))"
    )
    assert eval(str(view)) == view


def test_zero_size_axes():
    for shape in ((0, 4), (4, 0), (0, 4, 4), (2, 0, 4)):
        x = jnp.zeros(shape)
        view = MatrixView(-2, -1)
        assert from_matrices(to_matrices(x, view), view, shape).shape == shape
