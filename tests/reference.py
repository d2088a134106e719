"""Muon and AdamW in NumPy float64, written from the papers' formulas: the oracle of the parity tests.

Imports nothing of the package. Matrices are 2-D arrays; `layout` says what the axes are: 'io' is (fan_in,
fan_out) as in Flax, 'oi' is (fan_out, fan_in) as in PyTorch and Equinox. Everything is parameterised by
numbers, so that a recipe is a call with its numbers.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

KELLER = ((3.4445, -4.7750, 2.0315),) * 5
YOU = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

Factor = Callable[[int, int], float]


def sqrt_max(scale: float) -> Factor:
    return lambda fan_in, fan_out: scale * math.sqrt(max(fan_in, fan_out))


def sqrt_ratio(fan_in: int, fan_out: int) -> float:
    return math.sqrt(fan_out / fan_in)


def sqrt_ratio_min_one(fan_in: int, fan_out: int) -> float:
    return math.sqrt(max(1.0, fan_out / fan_in))


_MOONLIGHT = sqrt_max(0.2)


def scalar_map(s, coefficients):
    """The composed polynomial p: what the iteration does to a singular value."""
    s = np.asarray(s, np.float64)
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    return s


def _norm(singular_values, normalization):
    order = {"frobenius": 2, "schatten": 4}[normalization]
    largest = singular_values.max(initial=0.0)
    if largest == 0:
        return 1.0
    return largest * np.sum((singular_values / largest) ** order) ** (1 / order)


def newton_schulz(g, coefficients=KELLER, normalization="frobenius", safety=1.0, epsilon=0.0):
    """U p(Σ / norm) Vᵀ through the SVD: exact for any coefficients."""
    u, s, vt = np.linalg.svd(np.asarray(g, np.float64), full_matrices=False)
    return u * scalar_map(s / (safety * _norm(s, normalization) + epsilon), coefficients) @ vt


def newton_schulz_by_iteration(g, coefficients=KELLER, normalization="frobenius", safety=1.0, epsilon=0.0):
    """The iteration X <- a X + (b A + c A A) X, A = X Xᵀ; also for 'aol', which is no function of the
    singular values.
    """
    x = np.asarray(g, np.float64)
    if x.shape[0] > x.shape[1]:
        return newton_schulz_by_iteration(x.T, coefficients, normalization, safety, epsilon).T
    norm = np.linalg.norm(x)
    if norm == 0:
        return x
    if normalization == "frobenius":
        x = x / (safety * norm + epsilon)
    elif normalization == "schatten":
        x = x / (safety * np.sqrt(np.linalg.norm(x @ x.T)) + epsilon)
    elif normalization == "aol":
        rows = np.sqrt(np.abs(x @ x.T).sum(axis=1, keepdims=True))
        x = x / (safety * np.where(rows == 0, 1, rows))
    for a, b, c in coefficients:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def polar_factor(g, tolerance=1e-12):
    u, s, vt = np.linalg.svd(np.asarray(g, np.float64), full_matrices=False)
    return u * (s > tolerance * s.max(initial=0.0)) @ vt


@dataclasses.dataclass(frozen=True)
class MuonState:
    count: int
    momentum: np.ndarray
    second: np.ndarray | None = None


def momentum_step(state, g, mu, nesterov):
    """The momentum and what is orthogonalised, in the averaging form. `nesterov` is 'torch', 'optax' or None."""
    g = np.asarray(g, np.float64)
    m = mu * state.momentum + (1 - mu) * g
    t = state.count + 1
    if nesterov == "torch":
        return m, mu * m + (1 - mu) * g
    if nesterov == "optax":
        return m, mu * m / (1 - mu ** (t + 1)) + (1 - mu) * g / (1 - mu**t)
    assert nesterov is None
    return m, m


def sum_momentum_step(momentum, g, mu, nesterov=True):
    """The summing form, M <- μ M + g, of Moonlight and DeepSeek-V4: (1 - μ) times it is the averaging form."""
    momentum = mu * momentum + g
    return momentum, g + mu * momentum if nesterov else momentum


def normuon(update, second, *, beta2, layout="io", variant="paper"):
    """One second moment per output neuron, then the Frobenius norm of before (arXiv 2510.05491).

    variant 'modded' is modded-nanogpt's: one per row of the (fan_out, fan_in) matrix when it is tall or
    square, else one per column, and rsqrt(max(v, 1e-10)).
    """
    fan_in_axis = 0 if layout == "io" else 1
    axis = fan_in_axis
    if variant == "modded" and update.shape[1 - fan_in_axis] < update.shape[fan_in_axis]:
        axis = 1 - fan_in_axis
    second = beta2 * second + (1 - beta2) * np.mean(update**2, axis=axis, keepdims=True)
    divisor = np.sqrt(second) + 1e-10 if variant == "paper" else np.sqrt(np.maximum(second, 1e-10))
    scaled = update / divisor
    norm = np.linalg.norm(scaled)
    return scaled * (np.linalg.norm(update) / norm if norm else 0.0), second


def renormalized(update, rms):
    """The update at exactly this root mean square; zero stays zero."""
    norm = np.linalg.norm(update)
    return update * (rms * math.sqrt(update.size) / norm if norm else 0.0)


def muon_init(w, normuon_beta2=None):
    return MuonState(0, np.zeros(w.shape), None if normuon_beta2 is None else np.zeros((1, 1)))


def muon_step(
    w,
    g,
    state: MuonState,
    *,
    learning_rate: float,
    factor: Factor = _MOONLIGHT,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: str | None = "torch",
    coefficients=KELLER,
    normalization: str = "frobenius",
    safety: float = 1.0,
    epsilon: float = 0.0,
    layout: str = "io",
    exact: bool = False,
    cautious: bool = False,
    normuon_beta2: float | None = None,
    normuon_variant: str = "paper",
    rms: float | None = None,
):
    """W <- W - lr (f O + wd W): the whole step of one matrix. Returns the weights and the state.

    `exact` takes the polar factor for O; `cautious` decays only where f O and W have one sign; `rms` puts
    every update at exactly this root mean square instead of the factor.
    """
    w = np.asarray(w, np.float64)
    m, u = momentum_step(state, g, momentum, nesterov)
    if exact:
        o = polar_factor(u)
    elif normalization == "aol":
        o = newton_schulz_by_iteration(u, coefficients, normalization, safety, epsilon)
    else:
        o = newton_schulz(u, coefficients, normalization, safety, epsilon)
    second = state.second
    if normuon_beta2 is not None:
        o, second = normuon(o, second, beta2=normuon_beta2, layout=layout, variant=normuon_variant)
    fan_in, fan_out = w.shape if layout == "io" else w.shape[::-1]
    o = factor(fan_in, fan_out) * o if rms is None else renormalized(o, rms)
    decayed = w * (o * w >= 0) if cautious else w
    return w - learning_rate * (o + weight_decay * decayed), MuonState(state.count + 1, m, second)


def muon_trajectory(w0, gradients: Sequence, **numbers) -> np.ndarray:
    """The weights after each step, stacked. A number may be a callable of the step (from 0): a schedule."""
    w, state = np.asarray(w0, np.float64), muon_init(np.asarray(w0), numbers.get("normuon_beta2"))
    out = []
    for step, g in enumerate(gradients):
        now = {
            name: value(step)
            if name in ("learning_rate", "momentum", "weight_decay") and callable(value)
            else value
            for name, value in numbers.items()
        }
        w, state = muon_step(w, g, state, **now)
        out.append(w)
    return np.stack(out)


def hyperball_step(w, u, *, learning_rate, radius):
    """W <- R n(W - lr R n(u)), n(x) = x / ‖x‖_F (arXiv 2606.16899); the radius is that of the first weights."""
    moved = w - learning_rate * radius * u / np.linalg.norm(u)
    return radius * moved / np.linalg.norm(moved)


def adamw_trajectory(
    w0, gradients, *, learning_rate, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, nesterov=False
) -> np.ndarray:
    """AdamW with decoupled decay; the learning rate may be a callable of the step (from 0)."""
    w = np.asarray(w0, np.float64)
    m, v = np.zeros(w.shape), np.zeros(w.shape)
    out = []
    for step, g in enumerate(np.asarray(gradients, np.float64)):
        t = step + 1
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        first = m / (1 - b1**t)
        if nesterov:
            first = b1 * m / (1 - b1 ** (t + 1)) + (1 - b1) * g / (1 - b1**t)
        lr = learning_rate(step) if callable(learning_rate) else learning_rate
        w = w - lr * (first / (np.sqrt(v / (1 - b2**t)) + eps) + weight_decay * w)
        out.append(w)
    return np.stack(out)
