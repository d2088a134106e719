"""Abstract parameter trees of real models, each with the label and matrices of every leaf written by hand.

`MODELS` maps a name to a function that returns (params, expected). Expected maps the path of every leaf to
"adamw" or to (count, fan_in, fan_out). Nothing is allocated: leaves are ShapeDtypeStructs.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Expected = dict[str, str | tuple[int, int, int]]
MODELS: dict[str, Callable[[], tuple[Any, Expected]]] = {}


def model(build: Callable[[], tuple[Any, Expected]]) -> Callable[[], tuple[Any, Expected]]:
    MODELS[build.__name__] = build
    return build


def s(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def tree(leaves: dict[str, jax.ShapeDtypeStruct]) -> dict:
    """A nested dict from slash paths."""
    out: dict = {}
    for path, leaf in leaves.items():
        *above, last = path.split("/")
        node = out
        for component in above:
            node = node.setdefault(component, {})
        node[last] = leaf
    return out


def plain(leaves: dict[str, tuple[tuple[int, ...], str | tuple[int, int, int]]]) -> tuple[dict, Expected]:
    """A nested dict and its expectation from {path: (shape, expected)}."""
    return tree({p: s(*shape) for p, (shape, _) in leaves.items()}), {p: e for p, (_, e) in leaves.items()}


def adamw(paths: str, prefix: str = "") -> Expected:
    return dict.fromkeys((prefix + path for path in paths.split()), "adamw")


def muon(prefix: str = "", **leaves: tuple[int, int, int]) -> Expected:
    return {prefix + path.replace("__", "/"): matrices for path, matrices in leaves.items()}


# ---------------------------------------------------------------------------------------------------- NNX


def nnx_params(make: Callable) -> Any:
    from flax import nnx

    return nnx.state(nnx.eval_shape(lambda: make(nnx, nnx.Rngs(0))), nnx.Param)


@model
def nnx_attention_at_the_root():
    params = nnx_params(lambda nnx, rngs: nnx.MultiHeadAttention(4, 32, 64, rngs=rngs, decode=False))
    one = (1, 32, 64)
    return params, {
        **muon(query__kernel=one, key__kernel=one, value__kernel=one, out__kernel=(1, 64, 32)),
        **adamw("query/bias key/bias value/bias out/bias"),
    }


@model
def nnx_layers():
    def make(nnx, rngs):
        class Model(nnx.Module):
            def __init__(self):
                self.embed = nnx.Embed(50, 8, rngs=rngs)
                self.up = nnx.Linear(8, 32, rngs=rngs)
                self.mix = nnx.LinearGeneral((2, 4), (3, 5), axis=(-2, -1), rngs=rngs)
                self.split = nnx.LinearGeneral(8, (2, 6), rngs=rngs)
                self.conv = nnx.Conv(3, 16, (3, 5), rngs=rngs)
                self.depthwise = nnx.Conv(16, 16, (3, 3), feature_group_count=16, rngs=rngs)
                self.conv1d = nnx.Conv(8, 16, (4,), rngs=rngs)
                self.spatial = nnx.Conv(16, 16, (3, 3), feature_group_count=16, use_bias=False, rngs=rngs)
                self.ln = nnx.LayerNorm(8, rngs=rngs)
                self.rms = nnx.RMSNorm(8, rngs=rngs)
                self.bn = nnx.BatchNorm(8, rngs=rngs)
                self.gru = nnx.GRUCell(6, 8, rngs=rngs)
                self.lstm = nnx.OptimizedLSTMCell(6, 8, rngs=rngs)
                self.plain_lstm = nnx.LSTMCell(6, 8, rngs=rngs)
                self.lora = nnx.LoRA(8, 2, 16, rngs=rngs)
                self.lm_head = nnx.Linear(8, 50, use_bias=False, rngs=rngs)

        return Model()

    cell, inner = (1, 6, 8), (1, 8, 8)
    return nnx_params(make), {
        **muon(up__kernel=(1, 8, 32), mix__kernel=(1, 8, 15), split__kernel=(1, 8, 12)),
        **muon(conv__kernel=(1, 45, 16), conv1d__kernel=(1, 32, 16)),
        **muon("gru/", dense_i__kernel=(1, 6, 24), dense_h__kernel=(1, 8, 24)),
        **muon("lstm/", dense_i__kernel=(1, 6, 32), dense_h__kernel=(1, 8, 32)),
        **muon("plain_lstm/", ii__kernel=cell, ig__kernel=cell, io__kernel=cell),
        "plain_lstm/if_/kernel": cell,
        **muon("plain_lstm/", hi__kernel=inner, hf__kernel=inner, hg__kernel=inner, ho__kernel=inner),
        **muon(lora__lora_a=(1, 8, 2), lora__lora_b=(1, 2, 16)),
        **adamw("embed/embedding up/bias mix/bias split/bias conv/bias depthwise/bias depthwise/kernel"),
        **adamw("conv1d/bias spatial/kernel ln/scale ln/bias rms/scale bn/scale bn/bias lm_head/kernel"),
        **adamw("gru/dense_i/bias lstm/dense_h/bias"),
        **adamw("hi/bias hf/bias hg/bias ho/bias", "plain_lstm/"),
    }


@model
def nnx_scanned_blocks():
    def make(nnx, rngs):
        class Block(nnx.Module):
            def __init__(self, rngs):
                self.norm = nnx.RMSNorm(8, rngs=rngs)
                self.attn = nnx.MultiHeadAttention(2, 8, rngs=rngs, decode=False, use_bias=False)
                self.up = nnx.Linear(8, 32, use_bias=False, rngs=rngs)
                self.down = nnx.Linear(32, 8, rngs=rngs)

        class Model(nnx.Module):
            def __init__(self):
                make_blocks = nnx.vmap(lambda rngs: Block(rngs), in_axes=0, out_axes=0)
                self.blocks = nnx.split_rngs(splits=6)(make_blocks)(rngs)
                self.norm = nnx.RMSNorm(8, rngs=rngs)

        return Model()

    return nnx_params(make), {
        **muon("blocks/", up__kernel=(6, 8, 32), down__kernel=(6, 32, 8), attn__out__kernel=(6, 8, 8)),
        **muon("blocks/attn/", query__kernel=(6, 8, 8), key__kernel=(6, 8, 8), value__kernel=(6, 8, 8)),
        **adamw("blocks/norm/scale blocks/down/bias norm/scale"),
    }


@model
def nnx_gpt_in_a_list():
    def make(nnx, rngs):
        class Block(nnx.Module):
            def __init__(self):
                self.attn_norm = nnx.RMSNorm(8, rngs=rngs)
                self.c_attn = nnx.Linear(8, 24, use_bias=False, rngs=rngs)
                self.c_proj = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
                self.w_gate = nnx.Linear(8, 32, use_bias=False, rngs=rngs)
                self.w_down = nnx.Linear(32, 8, use_bias=False, rngs=rngs)

        class Model(nnx.Module):
            def __init__(self):
                self.wte = nnx.Embed(50, 8, rngs=rngs)
                self.wpe = nnx.Param(jnp.zeros((16, 8)))
                self.blocks = nnx.List([Block(), Block()])
                self.ln_f = nnx.LayerNorm(8, rngs=rngs)
                self.head = nnx.Linear(8, 50, rngs=rngs)

        return Model()

    expected = adamw("wte/embedding wpe ln_f/scale ln_f/bias head/kernel head/bias")
    for i in (0, 1):
        at = f"blocks/{i}/"
        expected |= muon(at, c_attn__kernel=(1, 8, 24), c_proj__kernel=(1, 8, 8))
        expected |= muon(at, w_gate__kernel=(1, 8, 32), w_down__kernel=(1, 32, 8))
        expected |= adamw("attn_norm/scale", at)
    return nnx_params(make), expected


# -------------------------------------------------------------------------------------------------- Linen


def linen_params(module: Any, *inputs: Any, **kwargs: Any) -> Any:
    return jax.eval_shape(lambda: module.init(jax.random.key(0), *inputs, **kwargs))["params"]


def _linen_scanned(axis: int, box: bool, bias: bool = True):
    import flax.linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            names = (
                (lambda *n: nn.with_logical_partitioning(nn.initializers.lecun_normal(), n)) if box else None
            )
            init = (lambda *n: {"kernel_init": names(*n)}) if names else (lambda *n: {})
            y = nn.RMSNorm()(x)
            y = nn.MultiHeadDotProductAttention(4, qkv_features=24, use_bias=bias)(y, y)
            y = nn.Dense(40, use_bias=bias, name="up", **init("embed", "mlp"))(x + y)
            y = nn.Dense(x.shape[-1], use_bias=bias, **init("mlp", "embed"))(nn.relu(y))
            return x + y, None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(50, 16)(tokens)
            scanned = nn.scan(
                Block,
                variable_axes={"params": axis},
                split_rngs={"params": True},
                length=6,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            x, _ = scanned(name="layers")(x, None)
            x = nn.LayerNorm()(x)
            return nn.Dense(50, name="logits_dense")(x)

    qkv = (6, 16, 24)
    at = "layers/MultiHeadDotProductAttention_0/"
    expected = {
        **muon("layers/", up__kernel=(6, 16, 40), Dense_0__kernel=(6, 40, 16)),
        **muon(at, query__kernel=qkv, key__kernel=qkv, value__kernel=qkv, out__kernel=(6, 24, 16)),
        **adamw("Embed_0/embedding layers/RMSNorm_0/scale LayerNorm_0/scale LayerNorm_0/bias"),
        **adamw("logits_dense/kernel logits_dense/bias"),
    }
    if bias:
        expected |= adamw("up/bias Dense_0/bias", "layers/") | adamw(
            "query/bias key/bias value/bias out/bias", at
        )
    return linen_params(Model(), jnp.zeros((2, 3), int)), expected


@model
def linen_scanned_axis_0():
    return _linen_scanned(0, box=False)


@model
def linen_scanned_axis_1():
    return _linen_scanned(1, box=False)


@model
def linen_scanned_axis_1_without_biases():
    return _linen_scanned(1, box=False, bias=False)


@model
def linen_scanned_boxed_axis_0():
    return _linen_scanned(0, box=True)


@model
def linen_scanned_boxed_axis_1():
    return _linen_scanned(1, box=True, bias=False)


@model
def linen_layers():
    import flax.linen as nn

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.DenseGeneral((3, 5))(x)
            y = nn.DenseGeneral(7, axis=(-2, -1))(y)
            y = nn.vmap(
                nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=4
            )(9)(y)
            y = nn.remat(nn.Dense)(12)(y[0])
            y = nn.WeightNorm(nn.Dense(6))(y)
            y = nn.RNN(nn.GRUCell(8))(y[None])
            y = nn.RNN(nn.OptimizedLSTMCell(8))(y)
            y = nn.MultiHeadDotProductAttention(2)(y, y)
            y = nn.GroupNorm(2)(y)
            return nn.Dense(10, name="classifier")(y)

    gru, inner = (1, 6, 8), (1, 8, 8)
    return linen_params(Model(), jnp.zeros((5, 6))), {
        **muon(DenseGeneral_0__kernel=(1, 6, 15), DenseGeneral_1__kernel=(1, 15, 7)),
        **muon(
            VmapDense_0__kernel=(4, 7, 9), CheckpointDense_0__kernel=(1, 9, 12), Dense_0__kernel=(1, 12, 6)
        ),
        **{f"GRUCell_0/{name}/kernel": gru for name in ("ir", "iz", "in")},
        **{f"GRUCell_0/{name}/kernel": inner for name in ("hr", "hz", "hn")},
        **{f"OptimizedLSTMCell_0/{a}{b}/kernel": inner for a in "ih" for b in "ifgo"},
        **{f"MultiHeadDotProductAttention_0/{n}/kernel": inner for n in ("query", "key", "value", "out")},
        **adamw(
            "DenseGeneral_0/bias DenseGeneral_1/bias VmapDense_0/bias CheckpointDense_0/bias Dense_0/bias"
        ),
        **adamw("WeightNorm_0/Dense_0/kernel/scale GRUCell_0/ir/bias GRUCell_0/iz/bias GRUCell_0/in/bias"),
        **adamw("GRUCell_0/hn/bias hi/bias hf/bias hg/bias ho/bias".replace(" h", " OptimizedLSTMCell_0/h")),
        **{f"MultiHeadDotProductAttention_0/{n}/bias": "adamw" for n in ("query", "key", "value", "out")},
        **adamw("GroupNorm_0/scale GroupNorm_0/bias classifier/kernel classifier/bias"),
    }


@model
def linen_resnet():  # WatChMaL/WatChMaL #108, google-deepmind/optax #1271
    import flax.linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.Conv(16, (3, 3), use_bias=False)(x)
            y = nn.BatchNorm(use_running_average=False)(y)
            y = nn.Conv(16, (3, 3), feature_group_count=16, use_bias=False, name="Conv_dw")(y)
            return nn.Conv(32, (1, 1), use_bias=False, name="conv_proj")(y)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Conv(8, (7, 7), name="conv_init")(x)
            x = nn.ConvTranspose(8, (2, 2))(Block()(x))
            return nn.Dense(10, name="head")(x.mean((1, 2)))

    return linen_params(Model(), jnp.zeros((1, 8, 8, 3))), {
        **muon(conv_init__kernel=(1, 147, 8), ConvTranspose_0__kernel=(1, 128, 8)),
        **muon("Block_0/", Conv_0__kernel=(1, 72, 16), conv_proj__kernel=(1, 16, 32)),
        **adamw("conv_init/bias ConvTranspose_0/bias head/kernel head/bias Block_0/Conv_dw/kernel"),
        **adamw("Block_0/BatchNorm_0/scale Block_0/BatchNorm_0/bias"),
    }


# ------------------------------------------------------------------------------------------------ Equinox


def equinox_params(make: Callable) -> Any:
    import equinox as eqx

    model = eqx.filter_eval_shape(make, eqx, jax.random.key(0))
    is_struct = lambda x: isinstance(x, jax.ShapeDtypeStruct)
    return eqx.filter(model, lambda x: is_struct(x) and jnp.issubdtype(x.dtype, jnp.floating))


@model
def equinox_layers():
    def make(eqx, key):
        nn = eqx.nn
        return {
            "linear": nn.Linear(8, 32, key=key),
            "attention": nn.MultiheadAttention(2, 8, qk_size=6, vo_size=5, use_query_bias=True, key=key),
            "conv": nn.Conv2d(4, 8, 3, key=key),
            "grouped": nn.Conv2d(4, 8, 3, groups=2, key=key),
            "depthwise": nn.Conv1d(4, 4, 3, groups=4, key=key),
            "transpose": nn.ConvTranspose2d(4, 6, 3, key=key),
            "embedding": nn.Embedding(50, 8, key=key),
            "gru": nn.GRUCell(6, 8, key=key),
            "lstm": nn.LSTMCell(6, 8, key=key),
            "ln": nn.LayerNorm((4, 8)),
            "rms": nn.RMSNorm(8),
            "gn": nn.GroupNorm(2, 8),
            "stack": eqx.filter_vmap(lambda k: nn.Linear(8, 24, key=k))(jax.random.split(key, 5)),
            "norms": eqx.filter_vmap(lambda _: nn.LayerNorm(8))(jnp.zeros(5)),
            "convs": eqx.filter_vmap(lambda k: nn.Conv1d(4, 8, 3, key=k))(jax.random.split(key, 5)),
            "mlp": nn.MLP(8, 1, 16, 1, key=key),
            "score": nn.Linear(8, 3, key=key),
        }

    return equinox_params(make), {
        **muon(linear__weight=(1, 8, 32), conv__weight=(1, 36, 8), grouped__weight=(2, 18, 4)),
        **muon("attention/", query_proj__weight=(1, 8, 12), key_proj__weight=(1, 8, 12)),
        **muon("attention/", value_proj__weight=(1, 8, 10), output_proj__weight=(1, 10, 8)),
        **muon(transpose__weight=(1, 36, 6), gru__weight_ih=(1, 6, 24), gru__weight_hh=(1, 8, 24)),
        **muon(lstm__weight_ih=(1, 6, 32), lstm__weight_hh=(1, 8, 32), stack__weight=(5, 8, 24)),
        **muon(convs__weight=(5, 12, 8), mlp__layers__0__weight=(1, 8, 16)),
        **adamw("linear/bias conv/bias grouped/bias depthwise/weight depthwise/bias transpose/bias"),
        **adamw("attention/query_proj/bias embedding/weight gru/bias gru/bias_n lstm/bias ln/weight ln/bias"),
        **adamw("rms/weight rms/bias gn/weight gn/bias stack/bias norms/weight norms/bias convs/bias"),
        **adamw("mlp/layers/0/bias mlp/layers/1/weight mlp/layers/1/bias score/weight score/bias"),
    }


# -------------------------------------------------------------------------------------- Trees of other code


@model
def embeddings_and_heads():
    # deepspeedai/DeepSpeed #7641, InternLM/xtuner #1486, vllm-project/speculators #866
    names = "lm_head output_layer unembed classifier score logits_dense wte shared pos_emb output head out"
    leaves = {f"{name}/kernel": ((64, 99), "adamw") for name in names.split()}
    return plain(
        leaves
        | {
            "embed/embedding": ((99, 64), "adamw"),
            "markov_head/table/embedding": ((99, 8), "adamw"),
            "markov_head/out/kernel": ((8, 99), "adamw"),
            "blk/kernel": ((64, 64), (1, 64, 64)),
            "encoder/layer/0/attention/output/dense/kernel": ((64, 64), (1, 64, 64)),
            "encoder/layer/0/output/dense/kernel": ((256, 64), (1, 256, 64)),
            "encoder/embed_positions": ((512, 64), "adamw"),
            "decoder/position_embedding": ((512, 64), "adamw"),
            "vision/positional_embedding_vlm": ((577, 64), "adamw"),
            "audio/conv_out/kernel": ((480, 64), (1, 480, 64)),
            "cls_token": ((1, 1, 64), "adamw"),
            "pos_embedding": ((1, 197, 64), "adamw"),
            "patch_embed/kernel": ((16, 16, 3, 64), "adamw"),
            "embeddings/patch_embeddings/projection/kernel": ((16, 16, 3, 64), "adamw"),
            "projector/fc1/kernel": ((64, 128), (1, 64, 128)),
            "projector/fc2": ((128, 64), (1, 128, 64)),
            "time_embedding/linear_1/kernel": ((64, 256), (1, 64, 256)),
            "dpt_head/conv": ((3, 3, 64, 1), "adamw"),
            "one_unit/kernel": ((64, 1), "adamw"),
            "row/kernel": ((1, 64), "adamw"),
            "logitdense/kernel": ((64, 99), "adamw"),
            "pre_logits/kernel": ((64, 48), (1, 64, 48)),
            "x_embedder/proj/kernel": ((2, 2, 4, 64), "adamw"),
            "final_layer/linear/kernel": ((64, 16), "adamw"),
            "time_mix_k": ((1, 1, 64), "adamw"),
        }
    )


@model
def moe():  # AI-Hypercomputer/maxtext #4798
    leaves: dict = {}
    for name in ("MoeBlock_0", "moe_block", "routed_experts", "GptOssMlp", "experts"):
        leaves |= {
            f"{name}/wi_0": ((8, 16, 32), (8, 16, 32)),
            f"{name}/wi_1": ((8, 16, 32), (8, 16, 32)),
            f"{name}/wo": ((8, 32, 16), (8, 32, 16)),
            f"{name}/wi_0_bias": ((8, 32), "adamw"),
            f"{name}/gate/kernel": ((16, 8), (1, 16, 8)),
        }
    return plain(
        leaves
        | {
            "block/router/kernel": ((16, 8), (1, 16, 8)),
            "block/moe/w1": ((8, 16, 32), (8, 16, 32)),
            "block/moe/w2": ((8, 32, 16), (8, 32, 16)),
            "block/moe/gate_up_proj": ((8, 16, 64), (8, 16, 64)),
            "block/moe/gate_up_proj_bias": ((8, 64), "adamw"),
            "block/moe/down_proj": ((8, 32, 16), (8, 32, 16)),
            "block/experts/up/kernel": ((8, 16, 32), (8, 16, 32)),
            "block/experts/up/bias": ((8, 32), "adamw"),
            "block/shared_expert/up/kernel": ((16, 32), (1, 16, 32)),
            "scanned/experts/w_in": ((3, 8, 16, 32), (24, 16, 32)),
            "scanned/experts/down/kernel": ((3, 8, 32, 16), (24, 32, 16)),
        }
    )


@model
def maxtext_scanned():
    """Layers on axis 1; the norms and the shared depth tell. Two scans of different depth side by side."""
    leaves: dict = {
        "token_embedder/embedding": ((99, 16), "adamw"),
        "decoder/decoder_norm/scale": ((16,), "adamw"),
        "decoder/logits_dense/kernel": ((16, 99), "adamw"),
    }
    for scan, depth in (("dense_layers", 3), ("moe_layers", 5)):
        at = f"decoder/{scan}/"
        leaves |= {
            at + "pre_self_attention_layer_norm/scale": ((16, depth), "adamw"),
            at + "self_attention/query/kernel": ((16, depth, 4, 6), (depth, 16, 24)),
            at + "self_attention/key/kernel": ((16, depth, 2, 6), (depth, 16, 12)),
            at + "self_attention/value/kernel": ((16, depth, 2, 6), (depth, 16, 12)),
            at + "self_attention/out/kernel": ((4, depth, 6, 16), (depth, 24, 16)),
            at + "self_attention/wkv_a/kernel": ((16, depth, 10), (depth, 16, 10)),
            at + "self_attention/wkv_b/kernel": ((10, depth, 4, 8), (depth, 10, 32)),
        }
    return plain(
        leaves
        | {
            "decoder/dense_layers/mlp/wi_0/kernel": ((16, 3, 40), (3, 16, 40)),
            "decoder/dense_layers/mlp/wo/kernel": ((40, 3, 16), (3, 40, 16)),
            "decoder/moe_layers/MoeBlock_0/wi_0": ((8, 5, 16, 32), (40, 16, 32)),
            "decoder/moe_layers/MoeBlock_0/wo": ((8, 5, 32, 16), (40, 32, 16)),
            "decoder/moe_layers/MoeBlock_0/gate/kernel": ((16, 5, 8), (5, 16, 8)),
        }
    )


@model
def maxtext_named():
    """The axis names of MaxText 0.2.5, each scan with a name of its own; nested scans; grouped projections."""

    from flax.linen import LogicallyPartitioned

    leaves = {
        "dense_layers/mlp/wi_0/kernel": (("embed", "dense_layers", "mlp"), (16, 3, 40), (3, 16, 40)),
        "dense_layers/attention/out/kernel": (
            ("q_heads", "dense_layers", "kv", "embed"),
            (4, 3, 6, 16),
            (3, 24, 16),
        ),
        "moe_layers/MoeBlock_0/wi_0": (
            ("exp", "moe_layers", "embed_moe", "mlp_moe"),
            (8, 5, 16, 32),
            (40, 16, 32),
        ),
        "moe_layers/MoeBlock_0/gate/kernel": (("embed_router", "moe_layers", None), (16, 5, 8), (5, 16, 8)),
        "moe_layers/norm/scale": (("norm", "moe_layers"), (16, 5), "adamw"),
        "layers/local_layers/in_proj_qkvz/kernel": (
            ("embed_attn", "layers", "local_layers", "gdn_head"),
            (16, 4, 3, 96),
            (12, 16, 96),
        ),
        "layers/local_layers/routed_experts/wo": (
            ("exp", "layers", "local_layers", "mlp_moe", "embed_moe"),
            (8, 4, 3, 32, 16),
            (96, 32, 16),
        ),
        "layers/local_layers/shared_expert_gate/kernel": (
            ("embed", "layers", "local_layers", None),
            (16, 4, 3, 1),
            "adamw",
        ),
        "scanned_blocks/o_a_proj/kernel": (
            ("o_groups", "scanned_blocks", "q_heads", "o_lora_up_proj"),
            (4, 5, 32, 16),
            (20, 32, 16),
        ),
        "scanned_blocks/mhc_mlp/res_alpha": (
            ("activation_embed", "scanned_blocks", None),
            (64, 5, 16),
            (5, 64, 16),
        ),
        "scanned_blocks/mhc_mlp/res_beta": ((None, "scanned_blocks", None), (4, 5, 4), "adamw"),
    }
    boxes = {path: LogicallyPartitioned(s(*shape), names) for path, (names, shape, _) in leaves.items()}
    return tree(boxes), {path: expected for path, (_, _, expected) in leaves.items()}


@model
def gemma():
    leaves: dict = {"embedder/input_embedding": ((99, 16), "adamw"), "final_norm/scale": ((16,), "adamw")}
    for i in range(2):
        at = f"layer_{i}/"
        leaves |= {
            at + "attn/q_einsum/w": ((4, 16, 6), (1, 16, 24)),
            at + "attn/kv_einsum/w": ((2, 1, 16, 6), (2, 16, 6)),
            at + "attn/attn_vec_einsum/w": ((4, 6, 16), (1, 24, 16)),
            at + "mlp/gating_einsum": ((2, 16, 40), (2, 16, 40)),
            at + "mlp/linear": ((40, 16), (1, 40, 16)),
            at + "pre_attention_norm/scale": ((16,), "adamw"),
        }
    return plain(
        leaves
        | {
            "fused/qkv_einsum/w": ((3, 4, 16, 6), (3, 16, 24)),
            "transposed/gating_einsum/w": ((2, 40, 16), (2, 16, 40)),
            "transposed/linear/w": ((40, 16), (1, 40, 16)),
        }
    )


@model
def transformers_flax():
    """GPT-2's Conv1D keeps its kernels (out, in); the biases beside them tell."""
    gpt2, bert, t5 = "transformer/h/0/", "bert/encoder/layer/0/", "encoder/block/0/layer/0/"
    return plain(
        {
            "transformer/wte/embedding": ((99, 16), "adamw"),
            "transformer/wpe/embedding": ((32, 16), "adamw"),
            gpt2 + "attn/c_attn/kernel": ((48, 16), (1, 16, 48)),
            gpt2 + "attn/c_attn/bias": ((48,), "adamw"),
            gpt2 + "attn/c_proj/kernel": ((16, 16), (1, 16, 16)),
            gpt2 + "attn/c_proj/bias": ((16,), "adamw"),
            gpt2 + "mlp/c_fc/kernel": ((64, 16), (1, 16, 64)),
            gpt2 + "mlp/c_fc/bias": ((64,), "adamw"),
            gpt2 + "ln_1/scale": ((16,), "adamw"),
            bert + "attention/self/query/kernel": ((16, 16), (1, 16, 16)),
            bert + "attention/output/dense/kernel": ((16, 16), (1, 16, 16)),
            bert + "intermediate/dense/kernel": ((16, 64), (1, 16, 64)),
            bert + "output/LayerNorm/scale": ((16,), "adamw"),
            "bert/pooler/dense/kernel": ((16, 16), (1, 16, 16)),
            "bert/embeddings/word_embeddings/embedding": ((99, 16), "adamw"),
            "cls/predictions/transform/dense/kernel": ((16, 16), "adamw"),
            "shared/embedding": ((99, 16), "adamw"),
            t5 + "SelfAttention/q/kernel": ((16, 24), (1, 16, 24)),
            t5 + "SelfAttention/o/kernel": ((24, 16), (1, 24, 16)),
            t5 + "SelfAttention/relative_attention_bias/embedding": ((32, 4), "adamw"),
            t5 + "DenseReluDense/wi_0/kernel": ((16, 40), (1, 16, 40)),
            t5 + "layer_norm/weight": ((16,), "adamw"),
            "lm_head/kernel": ((16, 99), "adamw"),
            "visual_projection/kernel": ((16, 12), (1, 16, 12)),
            "logit_scale": ((), "adamw"),
        }
    )


@model
def plain_gpt():
    """A tree somebody wrote by hand; layers stacked on axis 0."""
    return plain(
        {
            "wte": ((99, 16), "adamw"),
            "wpe": ((32, 16), "adamw"),
            "blocks/ln1": ((6, 16), "adamw"),
            "blocks/attn_norm": ((6, 16), "adamw"),
            "blocks/wq": ((6, 16, 24), (6, 16, 24)),
            "blocks/wk": ((6, 16, 12), (6, 16, 12)),
            "blocks/wv": ((6, 16, 12), (6, 16, 12)),
            "blocks/wo": ((6, 24, 16), (6, 24, 16)),
            "blocks/w_in": ((6, 16, 64), (6, 16, 64)),
            "blocks/b_in": ((6, 64), "adamw"),
            "blocks/w_out": ((6, 64, 16), (6, 64, 16)),
            "ln_f/g": ((16,), "adamw"),
            "ln_f/b": ((16,), "adamw"),
            "lm_head": ((16, 99), "adamw"),
        }
    )


@model
def plain_heads():
    """The same by hand, one block, with a head axis: (D, H, K) and (H, K, D)."""
    return plain(
        {
            "attn/wq": ((16, 4, 6), (1, 16, 24)),
            "attn/wk": ((16, 2, 6), (1, 16, 12)),
            "attn/wv": ((16, 2, 6), (1, 16, 12)),
            "attn/wo": ((4, 6, 16), (1, 24, 16)),
            "attn/bq": ((4, 6), "adamw"),
            "mlp/w1": ((16, 64), (1, 16, 64)),
            "mlp/b1": ((64,), "adamw"),
            "mlp/w2": ((64, 16), (1, 64, 16)),
            "linear/w": ((16, 24), (1, 16, 24)),
            "linear/b": ((24,), "adamw"),
        }
    )


@model
def stacked_heads_axis_0():
    return plain(
        {
            "layers/attn/query/kernel": ((6, 16, 4, 5), (6, 16, 20)),
            "layers/attn/key/kernel": ((6, 16, 4, 5), (6, 16, 20)),
            "layers/attn/value/kernel": ((6, 16, 4, 5), (6, 16, 20)),
            "layers/attn/out/kernel": ((6, 4, 5, 16), (6, 20, 16)),
            "layers/norm/scale": ((6, 16), "adamw"),
            "layers/mlp/up/kernel": ((6, 16, 64), (6, 16, 64)),
            "layers/mlp/down/kernel": ((6, 64, 16), (6, 64, 16)),
        }
    )


@model
def fused():
    return plain(
        {
            "attn/qkv/kernel": ((16, 48), (1, 16, 48)),
            "attn/qkv/bias": ((48,), "adamw"),
            "dense_general/qkv/kernel": ((16, 3, 4, 6), (3, 16, 24)),
            "dense_general/qkv/bias": ((3, 4, 6), "adamw"),
            "mlp/gate_up/kernel": ((16, 80), (1, 16, 80)),
            "mlp/down/kernel": ((40, 16), (1, 40, 16)),
        }
    )


@model
def lora():
    return plain(
        {
            "q/kernel": ((64, 64), (1, 64, 64)),
            "q/lora_a": ((64, 4), (1, 64, 4)),
            "q/lora_b": ((4, 64), (1, 4, 64)),
            "v/lora_A/kernel": ((64, 4), (1, 64, 4)),
            "v/lora_B/kernel": ((4, 64), (1, 4, 64)),
            "o/adapter/a": ((64, 4), (1, 64, 4)),
            "o/adapter/b": ((4, 32), (1, 4, 32)),
            "layers/q/lora_a": ((3, 64, 4), (3, 64, 4)),
            "layers/q/lora_b": ((3, 4, 64), (3, 4, 64)),
        }
    )


@model
def mamba():  # huggingface/pytorch-image-models #2580 for the convolutions
    return plain(
        {
            "embedding": ((99, 16), "adamw"),
            "layers/0/mixer/in_proj/kernel": ((16, 64), (1, 16, 64)),
            "layers/0/mixer/conv1d/kernel": ((4, 1, 32), "adamw"),
            "layers/0/mixer/conv1d/bias": ((32,), "adamw"),
            "layers/0/mixer/x_proj/kernel": ((32, 12), (1, 32, 12)),
            "layers/0/mixer/dt_proj/kernel": ((4, 32), (1, 4, 32)),
            "layers/0/mixer/dt_proj/bias": ((32,), "adamw"),
            "layers/0/mixer/dt_bias": ((32,), "adamw"),
            "layers/0/mixer/A_log": ((32, 8), "adamw"),
            "layers/0/mixer/D": ((32,), "adamw"),
            "layers/0/mixer/out_proj/kernel": ((32, 16), (1, 32, 16)),
            "layers/0/norm/scale": ((16,), "adamw"),
            "griffin/conv_1d/w": ((4, 16), "adamw"),
            "stacked/A_log": ((3, 32, 8), "adamw"),
            "stacked/D": ((3, 32), "adamw"),
            "stacked/dt_bias": ((3, 32), "adamw"),
        }
    )


@model
def haiku():
    return plain(
        {
            "mlp/~/linear_0/w": ((16, 32), (1, 16, 32)),
            "mlp/~/linear_0/b": ((32,), "adamw"),
            "conv2_d/w": ((3, 3, 8, 16), (1, 72, 16)),
            "conv2_d/b": ((16,), "adamw"),
            "layer_norm/scale": ((16,), "adamw"),
            "layer_norm/offset": ((16,), "adamw"),
            "embed/embeddings": ((99, 16), "adamw"),
            "attention/query/w": ((16, 24), (1, 16, 24)),
        }
    )


@model
def torch_names():
    """Weights carried over by name are output first, as in torch; each is flagged as a guess."""
    return plain(
        {
            "model/layers/0/self_attn/q_proj/weight": ((24, 16), (1, 16, 24)),
            "model/layers/0/mlp/up_proj/weight": ((64, 16), (1, 16, 64)),
            "model/layers/0/input_layernorm/weight": ((16,), "adamw"),
            "model/embed_tokens/weight": ((99, 16), "adamw"),
            "lm_head/weight": ((99, 16), "adamw"),
            "model.layers.1.mlp.up_proj.weight": ((64, 16), (1, 16, 64)),
            "model.layers.1.input_layernorm.weight": ((16,), "adamw"),
            "model.embed_tokens.weight": ((99, 16), "adamw"),
        }
    )
