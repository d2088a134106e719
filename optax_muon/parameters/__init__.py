"""From a tree of parameters to static specs; sees shapes, paths and metadata only."""

from optax_muon.parameters._blocks import Blocks, contiguous_blocks, interleaved_blocks
from optax_muon.parameters._matrix_view import MatrixShape, MatrixView, from_matrices, to_matrices
from optax_muon.parameters._paths import by_path, leaf_paths
from optax_muon.parameters._rules import (
    ADAMW,
    FROZEN,
    MUON,
    Decision,
    Rule,
    decays,
    decide,
    decide_leaves,
    matrix_views,
    param_labels,
    rules_from_names,
)

__all__ = [
    "ADAMW",
    "FROZEN",
    "MUON",
    "Blocks",
    "Decision",
    "MatrixShape",
    "MatrixView",
    "Rule",
    "by_path",
    "contiguous_blocks",
    "decays",
    "decide",
    "decide_leaves",
    "from_matrices",
    "interleaved_blocks",
    "leaf_paths",
    "matrix_views",
    "param_labels",
    "rules_from_names",
    "to_matrices",
]
