"""Orthogonalisation of stacks of matrices: arrays [*batch, rows, columns] to arrays of the same shape.

Knows no parameter, no optimizer and no mesh.
"""

from optax_muon.orthogonalization._coefficients import (
    AOL_4,
    CANS,
    CUBIC,
    DEEPSEEK_V4,
    GRAM_NEWTON_SCHULZ_5,
    KELLER,
    POLAR_EXPRESS,
    POLAR_EXPRESS_5,
    TRACK_3,
    YOU,
    Coefficients,
    polar_express,
)
from optax_muon.orthogonalization._normalization import AOL, Frobenius, Schatten
from optax_muon.orthogonalization._orthogonalizer import Orthogonalizer

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
    "TRACK_3",
    "YOU",
    "Coefficients",
    "Frobenius",
    "Orthogonalizer",
    "Schatten",
    "polar_express",
]
