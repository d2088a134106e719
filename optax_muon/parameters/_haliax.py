"""Haliax's own classes: they know by name which axes they sum over and which they make; all others are stacks."""

from optax_muon.parameters import _metadata as metadata
from optax_muon.parameters._paths import Leaf, Owner

_LINEAR = {"weight": ("hidden", "named"), "bias": ("bias", "")}
_NORM = {"weight": ("norm", ""), "bias": ("bias", "")}

MODULES = {
    "Linear": _LINEAR,
    "MoELinear": _LINEAR,
    "_ConvBase": _LINEAR,
    "Embedding": {"weight": ("embedding", "")},
    "LayerNormBase": _NORM,
    "LayerNorm": _NORM,
    "RmsNorm": _NORM,
}


def named_axes(owner: Owner, leaf: Leaf) -> tuple[str, str]:
    """Role and layout of a weight. Fused projections name their axis (`qkv`): each part is a matrix."""
    if leaf.names is None:
        return "hidden", ""
    made, summed = _names(owner.fact("Out")), _names(owner.fact("In")) | _names(owner.fact("Spatial"))
    if made & metadata.VOCAB:
        return "head", ""
    tokens = ["in" if n in summed else "out" if n in made - metadata.FUSED else "stack" for n in leaf.names]
    return "hidden", " ".join(tokens) if {"in", "out"} <= set(tokens) else ""


def _names(value: object) -> set[str]:
    return {value} if isinstance(value, str) else set(value) if isinstance(value, tuple) else set()
