"""Random parameter trees for the fuzz test: containers, names, shapes, dtypes, boxes, holes.

A tree is drawn as a plan (plain values that Hypothesis can shrink) and built from it, so that one plan can be
built in several containers. Shapes come from a short list: eager calls compile anew for each.
"""

import dataclasses
import typing

import equinox as eqx
import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hypothesis import strategies as st

NEUTRAL = ("block", "mlp", "0", "core", "net", "up", "down")
MODULES = (
    *NEUTRAL,
    *("attention", "query", "key", "value", "out", "qkv", "embed", "lm_head", "head", "norm", "layers"),
    *("experts", "conv", "Conv_0", "Dense_0", "router", "lora", "self_attn", "kv_einsum", "MoeBlock_0"),
)
ADAMW_LEAVES = ("bias", "scale", "embedding", "A_log")
HIDDEN_LEAVES = ("kernel", "w")
LEAVES = (
    *(*ADAMW_LEAVES, *HIDDEN_LEAVES, "weight", "wi_0", "wo", "lora_a", "lora_b", "a", "b", "D", "value", "x"),
    *("gate_up_proj", "dt_bias", "pos_embedding", "cls_token", "depthwise_kernel", "in_proj", "foo"),
)
SHAPES = {
    0: [()],
    1: [(0,), (1,), (4,)],
    2: [(4, 6), (6, 4), (4, 4), (4, 1), (1, 4), (0, 4)],
    3: [(2, 4, 6), (4, 2, 3), (1, 4, 6), (2, 0, 4)],
    4: [(2, 2, 2, 3), (3, 3, 1, 4), (2, 1, 4, 6)],
}
DTYPES = ("float32",) * 14 + ("bfloat16", "bfloat16", "float16", "int32", "int8", "bool")
AXIS_NAMES = ("embed", "mlp", "heads", "kv", "layers", "expert", "vocab", "data", None)


class Pair(typing.NamedTuple):
    kernel: typing.Any
    bias: typing.Any


class Weighted(eqx.Module):
    weight: typing.Any
    up: typing.Any

    def __call__(self, x):
        raise AssertionError("nobody calls a tree of parameters")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Block:
    attention: typing.Any
    scale: typing.Any


FIELDS = {"pair": (Pair, ("kernel", "bias")), "module": (Weighted, ("weight", "up"))}
FIELDS["dataclass"] = (Block, ("attention", "scale"))


@dataclasses.dataclass(frozen=True)
class Leaf:
    shape: tuple[int, ...]
    dtype: str = "float32"
    box: str | None = None  # 'partitioned', 'param' or None
    names: tuple[str | None, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Node:
    container: str
    children: tuple[tuple[str, typing.Any], ...]


@st.composite
def leaf_plans(draw, in_state: bool) -> Leaf | None:
    if draw(st.integers(0, 19)) == 0:
        return None
    ndim = draw(st.sampled_from((0, 1, 2, 2, 2, 2, 3, 3, 4)))
    shape = draw(st.sampled_from(SHAPES[ndim]))
    dtype = draw(st.sampled_from(DTYPES))
    box, names = None, None
    if draw(st.integers(0, 4)) == 0:
        box = "param" if in_state else "partitioned"
        names = tuple(draw(st.sampled_from(AXIS_NAMES)) for _ in shape)
    return Leaf(shape, dtype, box, names)


@st.composite
def nodes(draw, depth: int = 3, in_state: bool = False) -> Node:
    mappings = ("dict", "dict", "dict")
    others = ("frozen", "list", "tuple", "state", *FIELDS)
    container = "dict" if in_state else draw(st.sampled_from(mappings + others))
    inside = in_state or container == "state"
    if container in FIELDS:
        names = FIELDS[container][1]
    elif container in ("list", "tuple"):
        names = tuple(str(i) for i in range(draw(st.integers(0 if depth < 3 else 1, 2))))
    else:
        pool = st.sampled_from(("kernel",) * 10 + LEAVES + (MODULES if depth else ()))
        names = tuple(draw(st.lists(pool, min_size=2 if depth == 3 else 0, max_size=4, unique=True)))
    children = []
    for name in names:
        is_node = depth > 0 and name not in LEAVES and draw(st.integers(0, 3)) > 0
        children.append((name, draw(nodes(depth - 1, inside) if is_node else leaf_plans(inside))))
    return Node(container, tuple(children))


def build(plan: typing.Any, make: typing.Callable[[str, Leaf], typing.Any], path: str = "", plain=False):
    """The tree of a plan; `make(path, leaf)` gives the arrays. `plain` builds dicts only, without boxes."""
    if plan is None:
        return None
    if isinstance(plan, Leaf):
        array = make(path, plan)
        if plan.box is None or plain:
            return array
        return nn.Partitioned(array, plan.names) if plan.box == "partitioned" else nnx.Param(array)
    children = {
        name: build(child, make, f"{path}/{name}" if path else name, plain) for name, child in plan.children
    }
    if plain or plan.container == "dict":
        return children
    if plan.container == "frozen":
        return flax.core.FrozenDict(children)
    if plan.container == "state":
        return nnx.State(children)
    if plan.container in ("list", "tuple"):
        return {"list": list, "tuple": tuple}[plan.container](children.values())
    return FIELDS[plan.container][0](**children)


def leaves(plan: typing.Any, path: str = "") -> dict[str, Leaf]:
    """Path -> leaf, without the holes."""
    if plan is None:
        return {}
    if isinstance(plan, Leaf):
        return {path: plan}
    out = {}
    for name, child in plan.children:
        out |= leaves(child, f"{path}/{name}" if path else name)
    return out


@dataclasses.dataclass(frozen=True)
class Cut:
    """Arguments of `contiguous_blocks` (sizes) or `interleaved_blocks` (count)."""

    axis: int
    sizes: int | tuple[int, ...] | None
    count: int | None = None


@st.composite
def views(draw, shape: tuple[int, ...]):
    """(reduction axes, output axes, cuts) that fit a shape of rank 2 or more."""
    order = draw(st.permutations(range(len(shape))))
    n_in = draw(st.integers(1, len(shape) - 1))
    n_out = draw(st.integers(1, len(shape) - n_in))
    reduction, output = tuple(order[:n_in]), tuple(order[n_in : n_in + n_out])
    cuts = []
    axis = draw(st.sampled_from(reduction + output))
    if shape[axis] > 1 and draw(st.integers(0, 3)):
        if draw(st.booleans()):
            divisors = [k for k in range(1, shape[axis] + 1) if shape[axis] % k == 0]
            n = draw(st.sampled_from(divisors))
            cuts = [draw(st.sampled_from([Cut(axis, n), Cut(axis, None, n)]))]
        else:
            first = draw(st.integers(1, shape[axis] - 1))
            cuts = [Cut(axis, (first, shape[axis] - first))]
    return reduction, output, tuple(cuts)


@dataclasses.dataclass(frozen=True)
class Case:
    """A tree, what the user says about it, and how the optimizer is set."""

    plan: Node
    rules: tuple[tuple[str, typing.Any], ...]  # path -> None, a label, or a view as drawn by `views`
    labels: tuple[tuple[str, str | None], ...]  # for the first components of the paths
    nesterov: str | None
    mu_dtype: str | None
    scale: float
    zero_from: int  # every leaf from this position on has a zero gradient
    seed: int


@st.composite
def cases(draw) -> Case:
    plan = draw(nodes())
    found = leaves(plan)
    rules = []
    for path in draw(st.lists(st.sampled_from(sorted(found)), max_size=3, unique=True)) if found else []:
        leaf = found[path]
        kinds = [None, "muon", "adamw", "frozen"] + ["view"] * (8 if len(leaf.shape) > 1 else 0)
        kind = draw(st.sampled_from(kinds))
        rules.append((path, draw(views(leaf.shape)) if kind == "view" else kind))
    labels: list = []
    if found and draw(st.integers(0, 5)) == 0:
        choice = st.sampled_from(("muon", "adamw", "frozen", None))
        labels = [(name, draw(choice)) for name in dict.fromkeys(p.split("/")[0] for p in found)]
    return Case(
        plan,
        tuple(rules),
        tuple(labels),
        draw(st.sampled_from(("torch", "optax", None))),
        draw(st.sampled_from((None, None, "bfloat16"))),
        draw(st.sampled_from((1.0, 1.0, 1e-12, 1e12))),
        draw(st.sampled_from((99, 99, 99, 0, 1, 2))),
        draw(st.integers(0, 3)),
    )


def arrays(seed: int, scale: float = 1.0) -> typing.Callable[[str, Leaf], np.ndarray]:
    """Values for `build`, normally distributed; integers and booleans are zero or one."""

    def make(path: str, leaf: Leaf) -> typing.Any:
        rng = np.random.default_rng([seed, *path.encode()])
        floating = jnp.issubdtype(jnp.dtype(leaf.dtype), jnp.floating)
        size = scale**0.25 if leaf.dtype == "float16" else scale  # within its range
        x = rng.normal(size=leaf.shape) * size if floating else rng.integers(0, 2, leaf.shape)
        return jnp.asarray(np.asarray(x).astype(jnp.dtype(leaf.dtype)))

    return make
