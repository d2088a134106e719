"""Optax gradient transformations."""

from optax_muon.transforms import shape_factors
from optax_muon.transforms._attention_layouts import AttentionLayout, FusedHeads, MultiHead, MultiLatent
from optax_muon.transforms._attention_logits import max_attention_logits
from optax_muon.transforms._cautious_decay import CautiousDecayState, add_cautious_decayed_weights
from optax_muon.transforms._normuon import ScaleByNormuonState, scale_by_normuon
from optax_muon.transforms._qk_clip import qk_clip, qk_clip_transform
from optax_muon.transforms._renormalize import renormalize
from optax_muon.transforms._scale_by_muon import ScaleByMuonState, scale_by_muon
from optax_muon.transforms._scale_by_shape import scale_by_shape

__all__ = [
    "AttentionLayout",
    "CautiousDecayState",
    "FusedHeads",
    "MultiHead",
    "MultiLatent",
    "ScaleByMuonState",
    "ScaleByNormuonState",
    "add_cautious_decayed_weights",
    "max_attention_logits",
    "qk_clip",
    "qk_clip_transform",
    "renormalize",
    "scale_by_muon",
    "scale_by_normuon",
    "scale_by_shape",
    "shape_factors",
]
