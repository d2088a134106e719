"""The factors by which a recipe scales an orthogonal matrix, named by their formula.

Houses disagree on names ("spectral" is sqrt(max(in, out)) at one and sqrt(out/in) at another), so ours say
what they compute. They are frozen values, not functions: `optax.inject_hyperparams` would take a function for
a schedule.
"""

import math
from dataclasses import dataclass

from optax_muon.transforms._checks import check_not_negative


@dataclass(frozen=True)
class _Scaled:
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_not_negative(f"{type(self).__name__}: scale", self.scale)


@dataclass(frozen=True)
class SqrtMax(_Scaled):
    """`scale * sqrt(max(fan_in, fan_out))`: the RMS of the update is `scale`, whatever the shape."""

    scale: float = 0.2

    def factor(self, fan_in: int, fan_out: int) -> float:
        """The factor of one fan_in x fan_out matrix."""
        return self.scale * math.sqrt(max(fan_in, fan_out))


@dataclass(frozen=True)
class SqrtRatio(_Scaled):
    """`scale * sqrt(fan_out / fan_in)`: the RMS-to-RMS operator norm of the update is `scale`."""

    def factor(self, fan_in: int, fan_out: int) -> float:
        """The factor of one fan_in x fan_out matrix."""
        return self.scale * math.sqrt(fan_out / fan_in)


@dataclass(frozen=True)
class SqrtRatioMinOne(_Scaled):
    """`scale * sqrt(max(1, fan_out / fan_in))`: as `SqrtRatio`, never below `scale`."""

    def factor(self, fan_in: int, fan_out: int) -> float:
        """The factor of one fan_in x fan_out matrix."""
        return self.scale * math.sqrt(max(1.0, fan_out / fan_in))


def sqrt_max(scale: float = 0.2) -> SqrtMax:
    """The factor `scale * sqrt(max(fan_in, fan_out))`.

    An orthogonal fan_in x fan_out matrix has entries of RMS 1/sqrt(max(fan_in, fan_out)), so the update has
    RMS `scale` whatever its shape. With 0.2, a learning rate tuned for AdamW carries over.

    Args:
      scale: RMS of the update, dimensionless.

    Returns:
      A frozen value with `.factor(fan_in, fan_out)`.

    Raises:
      ValueError, TypeError: the scale is negative, not finite or no number.

    Example:
      >>> sqrt_max(0.2).factor(64, 256)
      3.2

    References:
      Moonlight, arXiv 2502.16982, section 2.2 (0.2); DeepSeek-V4, arXiv 2606.19348 (0.18).
    """
    return SqrtMax(scale)


def sqrt_ratio(scale: float = 1.0) -> SqrtRatio:
    """The factor `scale * sqrt(fan_out / fan_in)`.

    Args:
      scale: overall multiplier, dimensionless.

    Returns:
      A frozen value with `.factor(fan_in, fan_out)`.

    Raises:
      ValueError, TypeError: the scale is negative, not finite or no number.

    Example:
      >>> sqrt_ratio().factor(256, 64)
      0.5

    References:
      dion (there: "spectral"); Bernstein, "Deriving Muon".
    """
    return SqrtRatio(scale)


def sqrt_ratio_min_one(scale: float = 1.0) -> SqrtRatioMinOne:
    """The factor `scale * sqrt(max(1, fan_out / fan_in))`.

    Args:
      scale: overall multiplier, dimensionless.

    Returns:
      A frozen value with `.factor(fan_in, fan_out)`.

    Raises:
      ValueError, TypeError: the scale is negative, not finite or no number.

    Example:
      >>> sqrt_ratio_min_one().factor(64, 256), sqrt_ratio_min_one().factor(256, 64)
      (2.0, 1.0)

    References:
      Keller Jordan's muon.py; torch.optim.Muon's "original".
    """
    return SqrtRatioMinOne(scale)
