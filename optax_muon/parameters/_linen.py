"""Tables of the Flax families: Linen, Transformers' Flax models, T5X, MaxText, and plain trees."""

from optax_muon.parameters._names import Row

NORM = r"(?:\w+_)?\w*norms?(?:_\w+)?|(?:\w+_)?(?:ln|bn|gn|rms)(?:_\w+)?"
EMBEDDING = (
    r"(?:\w+_)?(?:embeds?|embedder|embeddings?|embs?)|wte|wpe|embed_(?:tokens|positions|in|tok|pos)|embeddings?_table"
    r"|(?:cls|class|mask|register|dist|query|prompt)_tokens?|cls|pos|positional|pe|codebook|latents|soft_prompt"
    r"|token_table|(?:rel|relative)_pos\w*|pos\w*_emb(?:ed|edding)s?_(?!proj|mlp)\w+"
)
ATTENTION = r"\w*(?:attn|attention|mla|mha)\w*"
HEAD = (
    r"head|(?!multi_|per_|attn_|attention_|self_|kv_|q_)\w+_head|lm_head\w*"
    r"|logits?\w*|final_layer"
    r"|(?!gate_|router_|pre_)\w+_logits|un_?embed\w*|classifiers?|classifier_\w+|\w+_classifier|score|output_layer"
    r"|output_projection|predictions?|readout|vocab_\w+"
)
ROOT_HEAD = (
    r"outputs?|out|out_proj|output_(?:proj|dense|linear)|proj_out|fc_out|(?:linear|dense|conv)_out"
    r"|final(?:_\w+)?"
)
_QKV = r"q|k|v|query|key|value|queries|keys|values"
QUERY = (
    rf"(?:to_|w_?)?(?:{_QKV})(?:_(?:proj|projection|kernel|lin|linear|dense|w))?"
    r"|w?(?:q|k|v|kv)_(?:a|b|up|down)(?:_proj)?"
)
FUSED = (
    r"(?:to_|w_?)?(?:qkv|kv)(?:_(?:proj|projection|kernel|dense))?"
    r"|c_attn|in_proj|query_key_value|fused_qkv|attn_qkv"
)
OUT = (
    r"(?:to_|w_?)?(?:o|out|output)(?:_(?:proj|projection|kernel|dense|w))?|c_proj|proj"
    r"|(?:attn|attention)_(?:o|out|output|proj)(?:_proj)?"
)
EXPERTS = r"(?:\w+_)?experts?(?:_\w+)?"
_MLP = (
    r"wi|wo|w\d|w_(?:in|out|gate|up|down|i|o|fc|proj)|gate|up|down|(?:gate|up|down|gate_up|in|out)_proj|gate_up"
    r"|c_fc|c_proj|fc|fc_(?:in|out)|mlp_\w+|ff_\w+|ffn_\w+|(?:mlp|experts?)(?:_w)?\d?"
)

SPLIT_HEADS = ("in out out", "in out")
MERGE_HEADS = ("in in out", "in out")
CONV = ("in in in in out", "in in in out", "in in out")

# Leaves that are AdamW's whatever their rank. Order matters: the first row that matches decides.
ROLES = (
    Row(
        "bias",
        "bias",
        "biases",
        # ..._beta and hc_base are the static biases of hyper-connections (DeepSeek-V4 in MaxText).
        leaf=r"bias(?:es)?(?:_\w+)?|\w+_bias(?:es)?|b|b\d+|b_\w+|b[qkvoi]|(?:res|pre|post)_beta|hc_base",
    ),
    Row(
        "norm",
        "norm",
        "scales and statistics of norms",
        leaf=r"scale|\w+_scale|scale_\w+|gamma|beta|offset|gain|mean|var|(?:moving|running)_\w+|layer_?scale\w*",
    ),
    Row("norm", "norm", "parameters of norms", parent=NORM, leaf=r"(?!\w*kernel)\w+"),
    Row("norm", "norm", "parameters of norms", subject=NORM, raw=True),
    Row(
        "state space",
        "ssm",
        "scalars of state-space layers",
        leaf=r"a_log|log_a\w*|a_(?:real|imag)|dt|log_dt|inv_dt|log_step|lambda(?:_\w+)?|inv_freq",
    ),
    # Before the embedding tables, whose names are alike.
    Row(
        "patch embedding",
        "embedding",
        "patch embeddings are the input layer",
        above=r"(?:to_)?patch_(?:embed\w*|proj\w*|conv)|patchif\w+|x_embed(?:der)?",
    ),
    Row(
        "patch embedding",
        "embedding",
        "patch embeddings are the input layer",
        subject=r"(?:to_)?patch_(?:embed\w*|proj\w*|conv|linear)|patchif\w+",
    ),
    Row("embedding", "embedding", "embedding tables look rows up", leaf=EMBEDDING),
    Row("embedding", "embedding", "embedding tables look rows up", subject=EMBEDDING),
    Row("embedding", "embedding", "tied token embedding", subject="shared", root=True),
    Row("head", "head", "output heads and classifiers", subject=HEAD, not_above=ATTENTION),
    Row("head", "head", "output heads and classifiers", above=HEAD, not_above=rf"{ATTENTION}|{QUERY}"),
    Row(
        "depthwise",
        "depthwise",
        "a depthwise kernel mixes no channels",
        subject=r"\w*(?:depthwise|dw_?conv|conv_?dw)\w*",
    ),
    Row("depthwise", "depthwise", "a depthwise kernel mixes no channels", leaf="depthwise_kernel"),
)

_BACK = (rf"{OUT}|wo|o", MERGE_HEADS)
_FORTH = (r"(?:to_|w_?)?(?:q|query)(?:_(?:proj|projection|kernel|dense|w))?", SPLIT_HEADS)
HIDDEN = (
    Row(
        "weight",
        "hidden",
        "output-first weights (out, in)",
        leaf=r"weights?",
        layouts=("out in",),
        sure=False,
    ),
    Row(
        "attention",
        "hidden",
        "fused projections, one matrix unless blocks are given",
        subject=FUSED,
        layouts=("in 3 out out", "in 2 out out", "in 3 out", "3 in out", "in out out", "in out"),
    ),
    Row(
        "attention",
        "hidden",
        "attention projections (D, H, K) or (D, H*K)",
        subject=QUERY,
        layouts=SPLIT_HEADS,
        partner=_BACK,
    ),
    Row(
        "attention",
        "hidden",
        "attention outputs (H, K, D) or (H*K, D)",
        subject=OUT,
        beside=QUERY,
        layouts=MERGE_HEADS,
        partner=_FORTH,
    ),
    Row(
        "attention",
        "hidden",
        "attention outputs (H, K, D) or (H*K, D)",
        subject=OUT,
        above=ATTENTION,
        layouts=MERGE_HEADS,
        partner=_FORTH,
    ),
    Row("lora", "hidden", "low-rank factors", leaf=r"lora_\w+", layouts=("in out",)),
    Row("lora", "hidden", "low-rank factors", subject=r"lora_\w+", layouts=("in out",)),
    Row("head", "head", "an output at the root of the model", subject=ROOT_HEAD, root=True),
    Row(
        "experts",
        "hidden",
        "experts (E, in, out)",
        above=EXPERTS,
        min_ndim=3,
        layouts=("stack in out", "in out"),
    ),
    Row(
        "experts",
        "hidden",
        "experts or layers (E, in, out)",
        subject=_MLP,
        raw=True,
        min_ndim=3,
        layouts=("stack in out",),
    ),
    Row(
        "mlp",
        "hidden",
        "feed-forward and gate matrices (in, out)",
        subject=_MLP,
        leaf=r"(?!weight).*",
        layouts=("in out",),
    ),
    Row(
        "convolution",
        "hidden",
        "convolutions (window * in, out)",
        subject=r"(?:\w+_)?conv(?:\dd|_?\d_?d)?(?:_transpose)?(?:_\w+)?",
        min_ndim=2,
        layouts=CONV,
    ),
    Row(
        "dense", "hidden", "dense layers (in, out)", subject=r"(?:\w+_)?dense", auto=True, layouts=("in out",)
    ),
    Row(
        "dense",
        "hidden",
        "dense layers (in, out)",
        subject=r"(?:\w+_)?(?:dense|linear|fc)",
        layouts=("in out",),
        sure=False,
    ),
    Row("kernel", "hidden", "kernels of hidden layers", leaf=r"(?:\w+_)?kernel|w"),
)

# Linen's own classes, when the module is run (rules_from_linen): class -> leaf -> (role, layout).
MODULES = {
    "Dense": {"kernel": ("hidden", "in out"), "bias": ("bias", "")},
    "DenseGeneral": {"kernel": ("hidden", "general"), "bias": ("bias", "")},
    "Conv": {"kernel": ("hidden", "conv"), "bias": ("bias", "")},
    "ConvLocal": {"kernel": ("depthwise", ""), "bias": ("bias", "")},
    "ConvTranspose": {"kernel": ("hidden", "conv"), "bias": ("bias", "")},
    "Embed": {"embedding": ("embedding", "")},
    **{
        norm: {"scale": ("norm", ""), "bias": ("bias", "")}
        for norm in ("LayerNorm", "RMSNorm", "BatchNorm", "GroupNorm", "InstanceNorm")
    },
}
