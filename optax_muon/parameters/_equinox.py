"""Equinox's own classes: a module tree holds them, so its leaves need no path. Weights are (out, in)."""

_NORM = {"weight": ("norm", ""), "bias": ("bias", ""), "g": ("norm", "")}
_CELL = {
    "weight_ih": ("hidden", "out in"),
    "weight_hh": ("hidden", "out in"),
    "bias": ("bias", ""),
    "bias_n": ("bias", ""),
}

_NORMS = ("LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm", "InstanceNorm", "WeightNorm", "SpectralNorm")

MODULES = {
    "Linear": {"weight": ("hidden", "out in"), "bias": ("bias", "")},
    "Conv": {"weight": ("hidden", "conv"), "bias": ("bias", "")},
    "ConvTranspose": {"weight": ("hidden", "conv"), "bias": ("bias", "")},
    "Embedding": {"weight": ("embedding", "")},
    "GRUCell": _CELL,
    "LSTMCell": _CELL,
    "PReLU": {"negative_slope": ("scalar", "")},
    **dict.fromkeys(
        ("LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm", "InstanceNorm", "WeightNorm", "SpectralNorm"),
        _NORM,
    ),
}
