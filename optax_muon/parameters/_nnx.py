"""Tables for NNX: Gemma's einsums as path words, and NNX's own classes for models given as objects."""

from optax_muon.parameters._linen import MODULES as LINEN_MODULES
from optax_muon.parameters._names import Row

EINSUMS = (
    Row(
        "einsum",
        "hidden",
        "query einsum (N, D, H)",
        subject=r"[qkv]_einsum",
        layouts=("out in out", "in out"),
    ),
    Row(
        "einsum",
        "hidden",
        "key and value einsum (2, K, D, H), each alone",
        subject="kv_einsum",
        layouts=("2 out in out",),
    ),
    Row(
        "einsum",
        "hidden",
        "query, key and value einsum (3, N, D, H), each alone",
        subject="qkv_einsum",
        layouts=("3 out in out",),
    ),
    Row(
        "einsum",
        "hidden",
        "attention output einsum (N, H, D)",
        subject="attn_vec_einsum",
        layouts=("in in out", "in out"),
    ),
    Row(
        "einsum",
        "hidden",
        "gate and up einsum, each alone",
        subject="gating_einsum",
        layouts=("2 in out", "2 out in"),
        partner=("linear", ("in out",)),
    ),
)

MODULES = {
    "Linear": LINEN_MODULES["Dense"],
    "LinearGeneral": LINEN_MODULES["DenseGeneral"],
    "Conv": LINEN_MODULES["Conv"],
    "ConvTranspose": LINEN_MODULES["ConvTranspose"],
    "Embed": LINEN_MODULES["Embed"],
    "LoRA": {"lora_a": ("hidden", "in out"), "lora_b": ("hidden", "in out")},
    **dict.fromkeys(
        ("LayerNorm", "RMSNorm", "BatchNorm", "GroupNorm", "InstanceNorm"), LINEN_MODULES["LayerNorm"]
    ),
}
