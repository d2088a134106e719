"""Matrices that are hard to orthogonalise, with their singular vectors, and three measures of the error."""

import functools

import jax.numpy as jnp
import numpy as np
from hypothesis import settings

from tests import reference as ref

# Few examples, always the same: these tests run on every change.
few = settings(max_examples=12, derandomize=True, deadline=None)

# Relative singular values of a matrix of short side n.
SPECTRA = {
    "rank one": lambda n: np.r_[1.0, np.zeros(n - 1)],
    "rank one + 1e-3": lambda n: np.r_[1.0, np.full(n - 1, 1e-3)],
    "rank eight + 1e-2": lambda n: np.r_[np.ones(8), np.full(n - 8, 1e-2)],
    "rank eight + 1e-4": lambda n: np.r_[np.ones(8), np.full(n - 8, 1e-4)],
    "rank eight + 1e-6": lambda n: np.r_[np.ones(8), np.full(n - 8, 1e-6)],
    "exponential, condition 1e2": lambda n: 1e2 ** -np.linspace(0, 1, n),
    "exponential, condition 1e4": lambda n: 1e4 ** -np.linspace(0, 1, n),
    "exponential, condition 1e6": lambda n: 1e6 ** -np.linspace(0, 1, n),
    "power 1": lambda n: np.arange(1.0, n + 1) ** -1,
    "power 2": lambda n: np.arange(1.0, n + 1) ** -2,
    "power 3": lambda n: np.arange(1.0, n + 1) ** -3,
}


@functools.cache
def hard_matrices(n: int, ratio: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A stack [len(SPECTRA), n, ratio n] in float32 and its U, Σ (Frobenius norm 1) and V."""
    rng = np.random.default_rng(n + ratio)
    u = np.linalg.qr(rng.normal(size=(n, n)))[0]
    v = np.linalg.qr(rng.normal(size=(n * ratio, n)))[0]
    s = np.stack([spectrum(n) for spectrum in SPECTRA.values()])
    s = s / np.linalg.norm(s, axis=1, keepdims=True)
    return ((u * s[:, None, :]) @ v.T).astype(np.float32), u, s, v


def errors(orthogonalizer, coefficients, n, ratio, safety=1.0):
    """Worst over the spectra: largest and root-mean-square singular value of the error, and the largest
    singular value.
    """
    x, u, s, v = hard_matrices(n, ratio)
    got = np.asarray(apply(x, orthogonalizer), np.float64)
    error = got - (u * ref.scalar_map(s / safety, coefficients)[:, None, :]) @ v.T

    def largest(stack):
        return np.sqrt(np.linalg.eigvalsh(stack @ stack.swapaxes(1, 2))[:, -1]).max()

    return largest(error), np.linalg.norm(error, axis=(1, 2)).max() / np.sqrt(n), largest(got)


def apply(x, orthogonalizer):
    # Not compiled as a whole: the operations are, and are shared by all coefficients of one shape.
    return orthogonalizer.apply(jnp.asarray(x))
