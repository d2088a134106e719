"""Haliax: named arrays tell their axes, its modules tell which of them they sum over.

Haliax is no dependency of the tests, so stand-ins have its class and module names. Tried with the real one in
integrations/test_frameworks.py.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_muon import MatrixView, describe, muon
from optax_muon.parameters import leaf_paths


@dataclasses.dataclass(frozen=True)
class Axis:
    name: str
    size: int


def axes(**sizes):
    return tuple(Axis(*item) for item in sizes.items())


@dataclasses.dataclass(frozen=True)
class NamedArray:
    array: Any
    axes: tuple[Axis, ...]


jax.tree_util.register_dataclass(NamedArray, ["array"], ["axes"])
NamedArray.__module__ = "haliax.core"


def module(name, **static):
    """A stand-in for a module of haliax.nn with a weight and a bias."""
    fields = [(field, Any) for field in ("weight", "bias", *static)]
    cls = dataclasses.make_dataclass(name, fields, frozen=True)
    cls.__module__ = "haliax.nn.linear"
    jax.tree_util.register_dataclass(cls, ["weight", "bias"], list(static))
    return lambda weight, bias=None: cls(weight=weight, bias=bias, **static)


def array(**sizes):
    return NamedArray(jnp.ones(tuple(sizes.values())), axes(**sizes))


EMBED = Axis("embed", 16)
MODEL = {
    "q_proj": module("Linear", In=EMBED, Out=axes(kv_head=2, group=3, head_size=4))(
        array(layer=5, kv_head=2, group=3, head_size=4, embed=16),
        array(layer=5, kv_head=2, group=3, head_size=4),
    ),
    "o_proj": module("Linear", In=axes(heads=6, head_size=4), Out=EMBED)(
        array(layer=5, embed=16, heads=6, head_size=4)
    ),
    "c_attn": module("Linear", In=EMBED, Out=axes(qkv=3, heads=4, head_size=4))(
        array(embed=16, qkv=3, heads=4, head_size=4)
    ),
    "experts": module("MoELinear", In=EMBED, Out=Axis("mlp", 8), Experts=Axis("experts", 7))(
        array(experts=7, embed=16, mlp=8)
    ),
    "router": module("Linear", In=EMBED, Out=Axis("experts", 7))(array(experts=7, embed=16)),
    "patch": module("_ConvBase", In=Axis("channels", 3), Out=EMBED, Spatial=axes(height=4, width=4))(
        array(embed=16, channels=3, height=4, width=4)
    ),
    "anything": module("Embedding", Vocab=Axis("token", 50), Embed=EMBED)(array(token=50, embed=16)),
    "last": module("Linear", In=EMBED, Out=Axis("vocab", 50))(array(vocab=50, embed=16)),
    "ln": module("RmsNorm", axis=EMBED)(array(layer=5, embed=16), array(layer=5, embed=16)),
}
VIEWS = {
    "q_proj/weight": MatrixView((4,), (1, 2, 3)),
    "o_proj/weight": MatrixView((2, 3), (1,)),
    "c_attn/weight": MatrixView((0,), (2, 3)),  # q, k and v are three matrices
    "experts/weight": MatrixView((1,), (2,)),
    "router/weight": MatrixView((1,), (0,)),
    "patch/weight": MatrixView((1, 2, 3), (0,)),
}
ROLES = {"anything/weight": "embedding", "last/weight": "head", "ln/weight": "norm", "ln/bias": "bias"}


def test_modules_tell_the_matrices():
    rows = {row.path: row for row in describe(MODEL).rows}
    assert {path: row.view for path, row in rows.items() if row.label == "muon"} == VIEWS
    assert {path: rows[path].role for path in ROLES} == ROLES
    assert rows["q_proj/bias"].label == "adamw"
    assert leaf_paths(MODEL["ln"]) == ["weight", "bias"]


@jax.numpy_dtype_promotion("standard")  # optax.adamw, though it trains nothing here
def test_updates_keep_the_named_arrays():
    linear = MODEL["q_proj"]
    gradient = np.random.default_rng(0).normal(size=linear.weight.array.shape).astype(np.float32)
    gradients = dataclasses.replace(
        linear, weight=dataclasses.replace(linear.weight, array=jnp.asarray(gradient))
    )
    optimizer = muon(1e-2, weight_decay=0.0)
    updates, state = jax.jit(optimizer.update)(gradients, optimizer.init(linear), linear)
    assert jax.tree.structure(updates) == jax.tree.structure(linear)
    mu = state.inner_states["muon"].inner_state[0].mu
    assert mu.weight.axes == linear.weight.axes
    # Muon ran, on the matrix of each layer
    step = np.asarray(updates.weight.array, np.float64).reshape(5, 24, 16)
    s = np.linalg.svd(step, compute_uv=False) / (1e-2 * 0.2 * 24**0.5)
    assert s.min() > 0.6
    assert s.max() < 1.25


def test_named_arrays_without_a_module_ask():
    with pytest.raises(ValueError, match=r"`x` has shape \(2, 3, 4\) and matches no rule"):
        describe({"x": array(a=2, b=3, c=4)})
