"""Optax gradient transformations."""

from optax_muon.transforms import shape_factors
from optax_muon.transforms._scale_by_muon import ScaleByMuonState, scale_by_muon
from optax_muon.transforms._scale_by_shape import scale_by_shape

__all__ = ["ScaleByMuonState", "scale_by_muon", "scale_by_shape", "shape_factors"]
