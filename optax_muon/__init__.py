"""Muon for JAX.

`optax_muon.muon(learning_rate)` is an Optax transformation that trains hidden weight matrices with Muon and
everything else with AdamW.
"""

from optax_muon import _checkpoint as checkpoints
from optax_muon import _diagnostics as diagnostics
from optax_muon import _recipes as recipes
from optax_muon._accumulation import accumulate_gradients
from optax_muon._describe import Description, describe
from optax_muon._memory import MemoryEstimate, estimate_memory
from optax_muon._module_rules import rules_from_equinox, rules_from_linen, rules_from_nnx
from optax_muon._muon import Muon, muon
from optax_muon._orthogonalize import orthogonalize
from optax_muon._state_shardings import state_shardings
from optax_muon.orthogonalization import (
    AOL,
    AOL_4,
    CANS,
    CUBIC,
    DEEPSEEK_V4,
    GRAM_NEWTON_SCHULZ_5,
    KELLER,
    POLAR_EXPRESS,
    POLAR_EXPRESS_5,
    YOU,
    Frobenius,
    Orthogonalizer,
    Schatten,
    polar_express,
)
from optax_muon.parameters import (
    MatrixView,
    Rule,
    contiguous_blocks,
    interleaved_blocks,
    matrix_views,
    param_labels,
    rules_from_names,
)
from optax_muon.transforms import (
    FusedHeads,
    MultiHead,
    MultiLatent,
    ScaleByMuonState,
    ScaleByNormuonState,
    add_cautious_decayed_weights,
    max_attention_logits,
    qk_clip,
    qk_clip_transform,
    renormalize,
    scale_by_muon,
    scale_by_normuon,
    scale_by_shape,
    shape_factors,
)

__version__ = "0.1.0"
__all__ = [
    "AOL",
    "AOL_4",
    "CANS",
    "CUBIC",
    "DEEPSEEK_V4",
    "GRAM_NEWTON_SCHULZ_5",
    "KELLER",
    "POLAR_EXPRESS",
    "POLAR_EXPRESS_5",
    "YOU",
    "Description",
    "Frobenius",
    "FusedHeads",
    "MatrixView",
    "MemoryEstimate",
    "MultiHead",
    "MultiLatent",
    "Muon",
    "Orthogonalizer",
    "Rule",
    "ScaleByMuonState",
    "ScaleByNormuonState",
    "Schatten",
    "accumulate_gradients",
    "add_cautious_decayed_weights",
    "checkpoints",
    "contiguous_blocks",
    "describe",
    "diagnostics",
    "estimate_memory",
    "interleaved_blocks",
    "matrix_views",
    "max_attention_logits",
    "muon",
    "orthogonalize",
    "param_labels",
    "polar_express",
    "qk_clip",
    "qk_clip_transform",
    "recipes",
    "renormalize",
    "rules_from_equinox",
    "rules_from_linen",
    "rules_from_names",
    "rules_from_nnx",
    "scale_by_muon",
    "scale_by_normuon",
    "scale_by_shape",
    "shape_factors",
    "state_shardings",
]
