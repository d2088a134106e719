"""Which axes form the matrix, and with which factor: faults of other packages, as what must hold here."""

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_muon import MatrixView, Rule, contiguous_blocks, describe, interleaved_blocks, muon, shape_factors
from tests import reference as ref


def normal(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def step(tx, params, gradients):
    return tx.update(gradients, tx.init(params), params)[0]


def update_of(kernel, view=None, **arguments):
    """The update of one kernel without decay, its gradient being itself."""
    rules = () if view is None else Rule("dense/kernel", view)
    tx = muon(1.0, weight_decay=0.0, rules=rules, **arguments)
    return step(tx, {"dense": {"kernel": kernel}}, {"dense": {"kernel": kernel}})["dense"]["kernel"]


MOONLIGHT = ref.sqrt_max(0.2)


def expected(kernel, factor=MOONLIGHT):
    return -factor(*kernel.shape) * ref.newton_schulz(np.asarray(kernel, np.float64))


def close(a, b):
    # measured 2e-6 (five steps in float32 against float64); bound 2e-5
    np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=0, atol=2e-5)


@pytest.mark.parametrize(("shape", "value"), [((4, 16), 2.0), ((16, 4), 1.0)])
def test_the_width_factor_follows_fans_and_not_axes(shape, value):  # google-deepmind/optax #1249
    factor = shape_factors.sqrt_ratio_min_one()
    params = {"dense": {"kernel": normal(shape)}, "layer": {"weight": normal(shape[::-1])}}
    rows = {r.path: r for r in describe(params, muon(1.0, shape_factor=factor)).rows}
    assert rows["dense/kernel"].factors == rows["layer/weight"].factors == (value,)
    close(
        update_of(params["dense"]["kernel"], shape_factor=factor),
        expected(normal(shape), ref.sqrt_ratio_min_one),
    )


def test_both_layouts_in_one_tree():  # marin-community/marin #3134
    kernel = normal((4, 6))
    linear = eqx.nn.Linear(4, 6, use_bias=False, key=jax.random.key(0))
    linear = eqx.tree_at(lambda m: m.weight, linear, kernel.T)
    params = {
        "flax": {"kernel": kernel},
        "equinox": linear,
        "bare": kernel.T,
        "attn": {"query": {"w": kernel}},
    }
    updates = step(muon(1.0, weight_decay=0.0, rules=Rule("bare", MatrixView(1, 0))), params, params)
    query = updates["attn"]["query"]["w"]
    for update in (updates["flax"]["kernel"], updates["equinox"].weight.T, updates["bare"].T, query):
        close(update, expected(kernel))


@pytest.mark.parametrize(
    ("path", "shape", "flat"),
    [
        (("conv", "kernel"), (3, 3, 2, 4), (18, 4)),
        (("attention", "query", "kernel"), (6, 2, 4), (6, 8)),
        (("attention", "out", "kernel"), (2, 4, 6), (8, 6)),
    ],
)
def test_updates_come_back_in_the_shape_of_the_leaf(path, shape, flat):  # KellerJordan/Muon #34
    leaf, tree = normal(shape), normal(shape)
    for name in reversed(path):
        tree = {name: tree}
    tree = (
        {"attention": {"query": {"kernel": normal((6, 2, 4))}} | tree["attention"]}
        if len(path) == 3
        else tree
    )
    update = step(muon(1.0, weight_decay=0.0), tree, tree)
    for name in path:
        update = update[name]
    assert (update.shape, update.dtype) == (shape, leaf.dtype)
    close(update.reshape(flat), expected(leaf.reshape(flat)))


def test_stacks_of_experts_come_back_too():  # KellerJordan/Muon #34
    stack = normal((2, 3, 4, 6))
    params = {"layers": {"experts": {"w_in": stack}}}
    update = step(muon(1.0, weight_decay=0.0), params, params)["layers"]["experts"]["w_in"]
    assert (update.shape, update.dtype) == (stack.shape, stack.dtype)
    for layer, expert in np.ndindex(2, 3):
        close(update[layer, expert], expected(stack[layer, expert]))


SIZES = {"gated": (8, 8, 4, 4), "gate up": (8, 8), "key key value": (4, 4, 8), "vit": (6, 6, 6)}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_each_block_is_a_matrix_with_its_own_factor(sizes):
    # NVIDIA/Megatron-LM #4731, #7077; microsoft/dion #90; InternLM/xtuner #2030
    parts = [normal((6, n), i) for i, n in enumerate(sizes)]
    fused = jnp.concatenate(parts, 1)
    for kernel, view in (
        (fused, MatrixView(0, 1, contiguous_blocks(1, sizes))),
        (fused.T, MatrixView(1, 0, contiguous_blocks(0, sizes))),
    ):
        update = update_of(kernel, view)
        update = update if kernel is fused else update.T
        close(update, np.concatenate([expected(p) for p in parts], 1))
    with pytest.raises(
        ValueError, match=rf"`dense/kernel`.* sum to {sum(sizes) + 2}, the axis has {sum(sizes)}"
    ):
        update_of(fused, MatrixView(0, 1, contiguous_blocks(1, (*sizes, 2))))


def test_interleaved_gate_and_up():  # NVIDIA/Megatron-LM #7077
    gate, up = normal((6, 4)), normal((6, 4), 1)
    update = update_of(jnp.stack([gate, up], -1).reshape(6, 8), MatrixView(0, 1, interleaved_blocks(1, 2)))
    close(update[:, ::2], expected(gate))
    close(update[:, 1::2], expected(up))


def test_a_head_has_the_factor_of_a_head():  # microsoft/dion #62
    heads = normal((8, 3, 4))
    apart = np.stack([expected(heads[:, h]) for h in range(3)], 1)
    close(update_of(heads, MatrixView(0, 2)), apart)
    close(update_of(heads.reshape(8, 12), MatrixView(0, 1, contiguous_blocks(1, 4))), apart.reshape(8, 12))
    rows = update_of(heads.reshape(8, 12).T, MatrixView(1, 0, contiguous_blocks(0, 4)))
    close(rows.T, apart.reshape(8, 12))


@pytest.mark.parametrize("order", ["sectioned", "grouped"])
def test_a_zero_block_has_a_zero_update_and_no_other_has(order):
    # PaddlePaddle/PaddleFleet #1482, deepspeedai/DeepSpeed #8580: how to check a layout against a model
    groups, d, head = 2, 6, 4
    q, k, v = normal((3, d, groups, head))
    k = k.at[:, 0].set(0)  # head 0 of K
    if order == "sectioned":
        fused, blocks = (
            jnp.concatenate([x.reshape(d, -1) for x in (q, k, v)], 1),
            contiguous_blocks(1, (8, 8, 8)),
        )
        zero = np.s_[:, 8:12]
    else:
        fused = jnp.stack([q, k, v], 2).reshape(d, -1)
        blocks, zero = contiguous_blocks(1, (4, 4, 4), repeats=groups), np.s_[:, 4:8]
    update = update_of(fused, MatrixView(0, 1, (blocks, contiguous_blocks(1, head))))
    assert not jnp.any(update[zero])
    chex.assert_trees_all_equal(jnp.any(update != 0, 0), jnp.any(fused != 0, 0))
    alone = expected(q[:, 1])
    close(update[:, 4:8] if order == "sectioned" else update[:, 12:16], alone)
