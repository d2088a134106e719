"""What `method='auto'` and the sizes of blocks and chunks rest on: a table of choices with the measurement
behind each.

Times are processor times on 2 CPU cores (AVX512-BF16), jax 0.12, each against its alternative in one process,
least of 7 to 15.
"""

import math
from typing import Any

import jax

from optax_muon.orthogonalization._coefficients import AOL_4, CUBIC, KELLER, YOU, Coefficients
from optax_muon.orthogonalization._gram_newton_schulz import SLOPE_LIMIT, input_width

# Sets whose error with narrow inputs was measured and stays below 1.5 times that of the standard iteration.
# Largest error over 20 hard spectra at n = 128 with bfloat16 inputs, Gram against standard: KELLER .069 /
# .056, YOU .050 / .034, CUBIC .063 / .056, AOL_4 .046 / .061; POLAR_EXPRESS_5 (.14 / .10) and the longer sets
# are left to the standard iteration.
_NARROW_GRAM = (KELLER, YOU, CUBIC, AOL_4)


def on_cpu(platform: str | None) -> bool:
    return (platform or jax.default_backend()) == "cpu"


def gram_from_ratio(coefficients: Coefficients, dtype: Any, short: int, platform: str | None = None) -> float:
    """The ratio of the sides from which 'auto' takes the Gram method; infinite for never.

    - float32 and wider: 1.5 where symmetric products are cut in blocks, else 2. By count the two break even
    at 1.3 and, with a
      restart and no blocks, at 1.5. Measured at 768 x 3072 without a restart: .52 of the time of the standard
      iteration; at 256 x 1024, neither blocks nor restart: .57.
    - Narrow inputs on CPU: 3. The products of Gram matrices stay in float32, at half the speed. Measured at
    768 x 3072: .78 of
      the time of the standard iteration, at 256 x 1024 .60.
    - Narrow inputs elsewhere: never. A true float32 product costs many narrow ones there; not measured.
    - A set with a single step too steep for the restart rule: never.
    """
    width = input_width(dtype)
    if any(abs(a) > SLOPE_LIMIT[width] for a, _, _ in coefficients):
        return math.inf
    if width == "wide":
        return 1.5 if symmetric_blocks(short, platform) > 1 else 2.0
    return 3.0 if on_cpu(platform) and coefficients in _NARROW_GRAM else math.inf


def symmetric_blocks(short: int, platform: str | None = None) -> int:
    """Into how many block rows a symmetric product is cut.

    One product against the full one, float32: 2 blocks .81-.94 at 256 (a whole update .99), .89-.99 at 512,
    .89 at 768, .88-.96 at 1024, .84 at 1536; 3 blocks .85 at 768, .84-.93 at 1024, .78 at 1536, for half as
    much again to compile. Elsewhere one: the TPU compiler's own estimate for a step on v5e with bfloat16 inputs
    is .22 ms against .28 in 2 blocks at 1024 x 4096, 1.15 against 1.30 at 2048 x 8192, 2.46 against 3.09 at
    4096 x 4096, 16.75 against 16.78 at 8192 x 8192: what mirroring reads and writes costs more than the
    products save, and compiling takes two to six times as long. GPU not measured.
    """
    if not on_cpu(platform):
        return 1
    return 1 if short < 512 else 2 if short < 768 else 3


def matrices_at_a_time(m: int, n: int, platform: str | None = None) -> int:
    """How many matrices to batch, so that one product does not leave the machine idle and temporaries stay
    small.

    A batch of 8 against one by one, float32 X Xᵀ: 213 against 165 GFLOP/s at 256 x 256, 240 against 241 at
    768 x 768. So 2**20 entries on CPU, 4 MiB. On accelerators 2**24 entries for sides up to 1024, by
    reasoning, not measured.
    """
    entries = 2**20 if on_cpu(platform) else 2**24 if min(m, n) <= 1024 else 1
    return max(1, min(64, entries // max(1, m * n)))
