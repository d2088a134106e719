"""Published recipes as numbers with their source. Public as `optax_muon.recipes`.

Each returns `muon` with the numbers of one publication; every argument of `muon` can be given by name to
change one.
"""

from typing import Any

from optax_muon._muon import Muon, ScalarOrSchedule, muon
from optax_muon.orthogonalization import KELLER, Orthogonalizer
from optax_muon.transforms import shape_factors


def keller(learning_rate: ScalarOrSchedule = 0.02, **changes: Any) -> Muon:
    """Keller Jordan's Muon: factor sqrt(max(1, out/in)), no decay, AdamW at a rate of its own.

    Numbers: five Keller steps, momentum 0.95 (EMA, Nesterov), learning rate 0.02, decay 0 (the README of that
    package uses 0.01); AdamW 3e-4, (0.9, 0.95), eps 1e-10 on embeddings, heads, gains and biases.

    Args:
      learning_rate: of the matrices, a number or a schedule.
      **changes: arguments of `muon` to change.

    Returns:
      A `Muon` transformation.

    Example:
      >>> from optax_muon import recipes
      >>> recipes.keller(0.02).config.weight_decay
      0.0

    References:
      KellerJordan/Muon, muon.py. Its epsilon 1e-7 in the normalisation is not reproduced: ours is exact at
      every scale.
    """
    numbers: dict[str, Any] = {
        "orthogonalizer": Orthogonalizer(coefficients=KELLER),
        "shape_factor": shape_factors.sqrt_ratio_min_one(),
        "weight_decay": 0.0,
        "adamw_learning_rate": 3e-4,
        "adamw_b1": 0.9,
        "adamw_b2": 0.95,
        "adamw_eps": 1e-10,
    }
    return muon(learning_rate, **numbers | changes)


def torch(learning_rate: ScalarOrSchedule = 1e-3, **changes: Any) -> Muon:
    """torch.optim.Muon with its "original" factor sqrt(max(1, out/in)).

    Numbers: five Keller steps, momentum 0.95 (EMA, Nesterov), learning rate 1e-3, decay 0.1 by the unadjusted
    rate. For its "match_rms_adamw" give `shape_factor=shape_factors.sqrt_max(0.2)`. torch.optim.Muon takes
    matrices only and leaves the rest to its caller; here the rest is AdamW with the same rate and decay.

    Args:
      learning_rate: a number or a schedule.
      **changes: arguments of `muon` to change.

    Returns:
      A `Muon` transformation.

    Example:
      >>> from optax_muon import recipes
      >>> recipes.torch(1e-3).config.shape_factor
      SqrtRatioMinOne(scale=1.0)

    References:
      torch.optim.Muon, PyTorch 2.9 and later.
    """
    numbers: dict[str, Any] = {
        "orthogonalizer": Orthogonalizer(coefficients=KELLER),
        "shape_factor": shape_factors.sqrt_ratio_min_one(),
        "weight_decay": 0.1,
        "weight_decay_mask": None,
    }
    return muon(learning_rate, **numbers | changes)


def moonlight(learning_rate: ScalarOrSchedule = 4.2e-4, **changes: Any) -> Muon:
    """Moonlight: update RMS 0.2, decay 0.1 on everything, one learning rate for both halves.

    Numbers: five Keller steps, momentum 0.95 (sum form, the same updates as EMA), factor 0.2 sqrt(max(in,
    out)), decay 0.1 by the base rate, norms and biases included; AdamW (0.9, 0.95), eps 1e-8, same rate. The
    authors trained 16B-A3B at 4.2e-4 on 5.7T tokens.

    Args:
      learning_rate: a number or a schedule.
      **changes: arguments of `muon` to change.

    Returns:
      A `Muon` transformation.

    Example:
      >>> from optax_muon import recipes
      >>> recipes.moonlight(4.2e-4).config.shape_factor
      SqrtMax(scale=0.2)

    References:
      "Muon is Scalable for LLM Training", arXiv 2502.16982.
    """
    numbers: dict[str, Any] = {
        "orthogonalizer": Orthogonalizer(coefficients=KELLER),
        "shape_factor": shape_factors.sqrt_max(0.2),
        "weight_decay": 0.1,
        "weight_decay_mask": None,
    }
    return muon(learning_rate, **numbers | changes)
