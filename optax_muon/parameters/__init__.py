"""From a tree of parameters to static specs; sees shapes, paths and metadata only."""

from optax_muon.parameters._blocks import Blocks, contiguous_blocks, interleaved_blocks
from optax_muon.parameters._matrix_view import MatrixShape, MatrixView, from_matrices, to_matrices

__all__ = [
    "Blocks",
    "MatrixShape",
    "MatrixView",
    "contiguous_blocks",
    "from_matrices",
    "interleaved_blocks",
    "to_matrices",
]
