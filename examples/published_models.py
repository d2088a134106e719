"""Abstract parameter trees of models whose configurations are published: shapes only, nothing is allocated.

Each function returns a tree of `jax.ShapeDtypeStruct` in the layout of a scanned Flax model: kernels are
(layers, in, out), experts (layers, experts, in, out). `place` gives the leaves shardings on a mesh, which may
be abstract.

    params = moonlight_16b_a3b()
    print(optax_muon.estimate_memory(optax_muon.muon(1e-3), place(params, mesh)))

Dimensions are those of the published configurations; small parts that the reports do not spell out (the static
biases and gates of DeepSeek-V4's hyper-connections, the compressors of its key-value cache) are left out.
PUBLISHED_TOTALS has the numbers of parameters that the authors state.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

Shapes = dict[str, Any]


def qwen2_5_3b(dtype: Any = jnp.float32) -> Any:
    """Qwen2.5-3B (arXiv 2412.15115): grouped-query attention with biases, tied embeddings."""
    d, heads, kv_heads, head = 2048, 16, 2, 128
    attention = {
        "q_proj": _linear(d, heads * head) | {"bias": (heads * head,)},
        "k_proj": _linear(d, kv_heads * head) | {"bias": (kv_heads * head,)},
        "v_proj": _linear(d, kv_heads * head) | {"bias": (kv_heads * head,)},
        "o_proj": _linear(heads * head, d),
    }
    block = _block(d, attention, _mlp(d, 11008))
    return _structs(_model(d, 151_936, {"layers": _stacked(36, block)}, tied=True), dtype)


def moonlight_16b_a3b(dtype: Any = jnp.float32) -> Any:
    """Moonlight-16B-A3B (arXiv 2502.16982): multi-head latent attention, 64 routed and 2 shared experts."""
    d = 2048
    attention = _latent_attention(d, heads=16, q_rank=None, kv_rank=512, nope=128, rope=64, value=128)
    return _structs(
        _mixture(d, 163_840, attention, layers=27, dense=1, width=11264, experts=64, shared=2, expert=1408),
        dtype,
    )


def kimi_k2(dtype: Any = jnp.float32) -> Any:
    """Kimi K2 (arXiv 2507.20534): 384 routed experts and one shared."""
    d = 7168
    attention = _latent_attention(d, heads=64, q_rank=1536, kv_rank=512, nope=128, rope=64, value=128)
    return _structs(
        _mixture(d, 163_840, attention, layers=61, dense=1, width=18432, experts=384, shared=1, expert=2048),
        dtype,
    )


def glm_5(dtype: Any = jnp.float32) -> Any:
    """GLM-5 (arXiv 2602.15763): latent and sparse attention, 256 routed experts and one shared."""
    d = 6144
    attention = _latent_attention(d, heads=64, q_rank=2048, kv_rank=512, nope=192, rope=64, value=256)
    attention |= {"indexer": _indexer(d, q_rank=2048, heads=32, head=128)}
    return _structs(
        _mixture(d, 154_880, attention, layers=78, dense=3, width=12288, experts=256, shared=1, expert=2048),
        dtype,
    )


def deepseek_v4_flash(dtype: Any = jnp.float32) -> Any:
    """DeepSeek-V4 Flash (arXiv 2606.19348), 284B."""
    d = 4096
    attention = _compressed_attention(d, heads=64, head=512, q_rank=1024, groups=8, group_rank=1024)
    return _structs(
        _mixture(d, 129_280, attention, layers=43, dense=0, width=0, experts=256, shared=1, expert=2048),
        dtype,
    )


def deepseek_v4_pro(dtype: Any = jnp.float32) -> Any:
    """DeepSeek-V4 Pro (arXiv 2606.19348), 1.6T."""
    d = 7168
    attention = _compressed_attention(d, heads=128, head=512, q_rank=1536, groups=16, group_rank=1024)
    return _structs(
        _mixture(d, 129_280, attention, layers=61, dense=0, width=0, experts=384, shared=1, expert=3072),
        dtype,
    )


MODELS = {
    "Qwen2.5-3B": qwen2_5_3b,
    "Moonlight-16B-A3B": moonlight_16b_a3b,
    "Kimi-K2": kimi_k2,
    "GLM-5": glm_5,
    "DeepSeek-V4-Flash": deepseek_v4_flash,
    "DeepSeek-V4-Pro": deepseek_v4_pro,
}

# As stated by the authors, in as many digits as they state.
PUBLISHED_TOTALS = {
    "Qwen2.5-3B": 3.09e9,
    "Moonlight-16B-A3B": 15.29e9 + 2 * 163_840 * 2048,  # 15.29B is without embeddings
    "Kimi-K2": 1.04e12,
    "GLM-5": 744e9,
    "DeepSeek-V4-Flash": 284e9,
    "DeepSeek-V4-Pro": 1.6e12,
}


def count(params: Any) -> int:
    """Number of parameters of a tree."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(params))


def place(params: Any, mesh: Any) -> Any:
    """The tree with shardings: each mesh axis, in mesh order, cuts the longest axis of a leaf that it divides.

    The first axis of a stack of layers stays whole, as a scan over it needs; experts are an axis like any
    other.

    Args:
        params: tree of arrays or ShapeDtypeStructs.
        mesh: a `jax.sharding.Mesh` or `AbstractMesh`.
    """

    def one(path: Any, x: Any) -> jax.ShapeDtypeStruct:
        scanned = "layers" in jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        left = [1 if scanned and axis == 0 else n for axis, n in enumerate(x.shape)]
        entries: list[list[str]] = [[] for _ in x.shape]
        for name, size in mesh.shape.items():
            fits = [axis for axis, n in enumerate(left) if n % size == 0 and n > 1]
            if fits:
                axis = max(fits, key=lambda axis: left[axis])
                left[axis] //= size
                entries[axis].append(name)
        spec = P(*(tuple(names) if len(names) > 1 else names[0] if names else None for names in entries))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(one, params)


def _linear(fan_in: int, fan_out: int) -> Shapes:
    return {"kernel": (fan_in, fan_out)}


def _norm(width: int) -> Shapes:
    return {"scale": (width,)}


def _mlp(d: int, width: int) -> Shapes:
    return {"gate_proj": _linear(d, width), "up_proj": _linear(d, width), "down_proj": _linear(width, d)}


def _latent_attention(
    d: int, *, heads: int, q_rank: int | None, kv_rank: int, nope: int, rope: int, value: int
) -> Shapes:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""
    query = heads * (nope + rope)
    down = {"q_a_proj": _linear(d, q_rank), "q_a_norm": _norm(q_rank)} if q_rank else {}
    return down | {
        ("q_b_proj" if q_rank else "q_proj"): _linear(q_rank or d, query),
        "kv_a_proj": _linear(d, kv_rank + rope),
        "kv_a_norm": _norm(kv_rank),
        "kv_b_proj": _linear(kv_rank, heads * (nope + value)),
        "o_proj": _linear(heads * value, d),
    }


def _indexer(d: int, *, q_rank: int, heads: int, head: int) -> Shapes:
    """The lightning indexer of DeepSeek sparse attention."""
    return {
        "q_proj": _linear(q_rank, heads * head),
        "k_proj": _linear(d, head),
        "k_norm": _norm(head),
        "weights_proj": _linear(d, heads),
    }


def _compressed_attention(
    d: int, *, heads: int, head: int, q_rank: int, groups: int, group_rank: int
) -> Shapes:
    """One shared key-value head, and an output map of low rank in groups of heads."""
    return {
        "q_a_proj": _linear(d, q_rank),
        "q_a_norm": _norm(q_rank),
        "q_b_proj": _linear(q_rank, heads * head),
        "kv_proj": _linear(d, head),
        "kv_norm": _norm(head),
        # One map per group of heads: a stack of matrices, as experts are.
        "o_groups": {"experts": {"down_proj": {"kernel": (groups, heads * head // groups, group_rank)}}},
        "o_proj": _linear(groups * group_rank, d),
        "indexer": _indexer(d, q_rank=q_rank, heads=64, head=128),
    }


def _block(d: int, attention: Shapes, mlp: Shapes) -> Shapes:
    return {"attention_norm": _norm(d), "attention": attention, "mlp_norm": _norm(d), "mlp": mlp}


def _mixture(
    d: int,
    vocab: int,
    attention: Shapes,
    *,
    layers: int,
    dense: int,
    width: int,
    experts: int,
    shared: int,
    expert: int,
) -> Shapes:
    routed = {name: {"kernel": (experts, *linear["kernel"])} for name, linear in _mlp(d, expert).items()}
    moe = {"router": _linear(d, experts), "experts": routed, "shared_experts": _mlp(d, shared * expert)}
    blocks = {f"dense_block_{i}": _block(d, attention, _mlp(d, width)) for i in range(dense)}
    return _model(
        d, vocab, blocks | {"layers": _stacked(layers - dense, _block(d, attention, moe))}, tied=False
    )


def _model(d: int, vocab: int, blocks: Shapes, *, tied: bool) -> Shapes:
    head = {} if tied else {"lm_head": _linear(d, vocab)}
    return {"embed": {"embedding": (vocab, d)}, **blocks, "final_norm": _norm(d), **head}


def _stacked(layers: int, block: Shapes) -> Shapes:
    return jax.tree.map(lambda shape: (layers, *shape), block, is_leaf=lambda x: isinstance(x, tuple))


def _structs(shapes: Shapes, dtype: Any) -> Any:
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )
