"""Published coefficient sets of odd polynomial iterations, and the generator that recomputes some of them.

A set is a tuple of triples `(a, b, c)`, one per step: each singular value s becomes `a s + b s³ + c s⁵`. Sets
concatenate and repeat like any tuple: `KELLER * 2` is ten steps. `c = 0` is a cubic step and costs two matrix
products, not three.
"""

import math
from typing import TypeAlias

import numpy as np

Coefficients: TypeAlias = tuple[tuple[float, float, float], ...]


def divided(coefficients: Coefficients, safety: float) -> Coefficients:
    """The triples of `p(s / safety)`, step by step: `(a / safety, b / safety³, c / safety⁵)`."""
    return tuple((a / safety, b / safety**3, c / safety**5) for a, b, c in coefficients)


# Keller Jordan, "Muon: an optimizer for hidden layers" (2024). Steep at 0 and never 1: it keeps the band
# .68-1.13.
KELLER: Coefficients = ((3.4445, -4.7750, 2.0315),) * 5
"""Five steps of Keller Jordan's quintic, the default: a band of .68 to 1.13 for relative singular values from
1e-2.
"""

# Jiacheng You, 2024-12: the steps optimised one by one. dion without Polar Express, Emerging-Optimizers
# "quintic", optax "dion".
YOU: Coefficients = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""Jiacheng You's five steps, each with its own triple: a band of .98 to 1.03 for relative singular values
from 1e-2.
"""

# arXiv 2505.16932, algorithm 1 (lower bound 1e-3, cushion .02407327424182761). The last triple is the fixed
# point of the construction, 15/8, -10/8, 3/8; it repeats from here on.
_POLAR_EXPRESS_UNSAFE: Coefficients = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845749493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
# The paper divides every triple but the last, so that rounding cannot carry a singular value past the
# interval.
POLAR_EXPRESS: Coefficients = divided(_POLAR_EXPRESS_UNSAFE[:-1], 1.01) + _POLAR_EXPRESS_UNSAFE[-1:]
"""Polar Express, eight steps (arXiv 2505.16932), made safe by 1.01 as in the paper: converges to the polar
factor.
"""

# As modded-nanogpt, nanochat and dion ship it: lower bound 1e-3, safety 2e-2 and cushion 2e-2, both inside
# the construction.
POLAR_EXPRESS_5: Coefficients = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
"""Polar Express in five steps as modded-nanogpt and dion use it, there with
`normalization=Frobenius(safety=1.02)`.
"""

# Dao-AILab gram-newton-schulz: the first five of the paper's unsafe list, every one divided by 1.05.
GRAM_NEWTON_SCHULZ_5: Coefficients = divided(_POLAR_EXPRESS_UNSAFE[:5], 1.05)
"""Polar Express in five steps with a safety of 1.05, the set of the gram-newton-schulz package."""

# arXiv 2506.10935, Chebyshev-optimised. Nothing above 1 is tolerated, hence the safety factor in the
# docstring.
CANS: Coefficients = (
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
)
"""CANS in five steps (arXiv 2506.10935). Tolerates no singular value above 1: use it with
`Frobenius(safety=1.01)`, and with float32 products. With bfloat16 products (what 'auto' takes on
accelerators) rounding carries singular values to 1.2 to 2.9 on hard spectra, and a warning says so.
"""

# arXiv 2606.19348 (DeepSeek-V4): eight steps to get near 1, two to land on it.
DEEPSEEK_V4: Coefficients = ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2
"""DeepSeek-V4's ten steps (arXiv 2606.19348), eight of Keller's and two that converge: a band of 1.0000 to
1.0005.
"""

# modded-nanogpt, track 3: the converging triple alone.
TRACK_3: Coefficients = ((2.0, -1.5, 0.5),) * 12
"""Twelve converging steps (modded-nanogpt, track 3): exact where it has converged, but slow, its slope at 0
is 4096.
"""

# arXiv 2606.00371: exactly five cubic steps, ten products in all.
CUBIC: Coefficients = (
    (3.3656576, -3.3420992, 0.0),
    (2.5744352, -1.4957376, 0.0),
    (2.5368962, -1.4312570, 0.0),
    (2.4418906, -1.2764040, 0.0),
    (2.2230472, -0.9630650, 0.0),
)
"""Five cubic steps (arXiv 2606.00371): ten products, not fifteen; a wide band, and signs flip just above 1.
"""

# arXiv 2512.04632 (Turbo-Muon).
AOL_4: Coefficients = (
    (4.6051, -9.6552, 5.6769),
    (4.7505, -6.0861, 2.1790),
    (2.7763, -2.3190, 0.5523),
    (2.4231, -2.2861, 0.8193),
)
"""Turbo-Muon's four steps (arXiv 2512.04632), only with `normalization='aol'`: then not the polar factor of
the input.
"""


def polar_express(
    steps: int, *, lower: float = 1e-3, safety: float = 0.0, cushion: float = 0.02407327424182761
) -> Coefficients:
    """The greedy composition of optimal odd quintics on the interval [lower, 1].

    Step t takes the quintic p minimising `max |1 - p(s)|` over `[max(l, cushion u), u]`, then the interval
    becomes `[p(l), 2 - p(l)]`. Everything is computed in float64 when the function is called; nothing depends
    on JAX.

    Args:
        steps: how many triples.
        lower: the smallest relative singular value that the composition is made for, in (0, 1).
        safety: every triple but the last is divided by `(1 + safety)`, its third and fifth power, inside the
            construction, so that the following steps know of it.
        cushion: the steps never assume an interval narrower than `[cushion u, u]`; it bounds their slope at 0
            in the interest of the singular values below `lower`.

    Returns:
        `steps` triples `(a, b, c)` of Python floats.

    Raises:
        ValueError: a number out of its range.

    Example:
        >>> a, b, c = polar_express(3)[0]
        >>> round(a, 6), round(b, 6), round(c, 6)
        (8.287212, -23.595887, 17.300387)

    Source: Amsel, Persson, Musco, Gower, arXiv 2505.16932, algorithm 1 and section 3.
    """
    if steps < 1:
        raise ValueError(f"polar_express: steps={steps} must be at least 1.")
    if not 0.0 < lower < 1.0:
        raise ValueError(f"polar_express: lower={lower} must lie strictly between 0 and 1, for example 1e-3.")
    if not (safety >= 0.0 and math.isfinite(safety)):
        raise ValueError(f"polar_express: safety={safety} must be a finite number >= 0, for example 0.01.")
    if not 0.0 <= cushion < 1.0:
        raise ValueError(f"polar_express: cushion={cushion} must lie in [0, 1).")
    low, high = lower, 1.0
    triples = []
    for step in range(steps):
        triple = _optimal_quintic(max(low, cushion * high), high)
        if cushion * high > low:
            # The optimum was for a narrower interval: centre its values at the ends of the true one around 1
            # again.
            centre = 2.0 / (_evaluate(triple, low) + _evaluate(triple, high))
            a, b, c = triple
            triple = (centre * a, centre * b, centre * c)
        if step < steps - 1:
            (triple,) = divided((triple,), 1.0 + safety)
        triples.append(triple)
        low = _evaluate(triple, low)
        high = 2.0 - low
    return tuple(triples)


def _evaluate(triple: tuple[float, float, float], s: float) -> float:
    a, b, c = triple
    return a * s + b * s**3 + c * s**5


def _optimal_quintic(low: float, high: float) -> tuple[float, float, float]:
    """The odd quintic with the least `max |1 - p|` on [low, high], by equioscillation at the ends and at two
    interior points.
    """
    if low >= high * (1.0 - 5e-6):
        # The system is singular in floating point; its limit is the quintic whose value is 1 with two zero
        # derivatives.
        return 15 / 8 / high, -10 / 8 / high**3, 3 / 8 / high**5
    inner, outer = (3 * low + high) / 4, (low + 3 * high) / 4
    error, previous = math.inf, math.nan
    a = b = c = 0.0
    while abs(error - previous) > 1e-15 or math.isnan(previous):
        points = np.array([low, inner, outer, high])
        system = np.stack([points, points**3, points**5, np.array([1.0, -1.0, 1.0, -1.0])], axis=1)
        previous = error
        a, b, c, error = (float(x) for x in np.linalg.solve(system, np.ones(4)))
        # The next interior points: where p'(s) = a + 3b s² + 5c s⁴ vanishes.
        root = math.sqrt(9 * b * b - 20 * a * c)
        inner, outer = math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))
    return a, b, c
