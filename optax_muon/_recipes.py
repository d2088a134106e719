"""Published recipes as numbers with their source. Public as `optax_muon.recipes`.

Each returns `muon` with the numbers of one publication; every argument of `muon` can be given by name to
change one.
"""

from typing import Any

from optax_muon._muon import Muon, ScalarOrSchedule, muon, with_presets
from optax_muon._recipe_parts import (
    MODDED_POLAR_EXPRESS,
    QKV,
    ByName,
    HeadsToo,
    every_second_step,
    latent_blocks,
    muon_chain,
    per_head,
    there_and_back,
    times,
)
from optax_muon.orthogonalization import DEEPSEEK_V4, KELLER, YOU, Orthogonalizer
from optax_muon.parameters import Rule
from optax_muon.transforms import (
    add_cautious_decayed_weights,
    scale_by_normuon,
    scale_by_shape,
    shape_factors,
)


def _rules(changes: dict[str, Any], *more: Rule) -> tuple[Rule, ...]:
    """The user's rules, then a recipe's."""
    given = changes.get("rules") or ()
    return (*((given,) if isinstance(given, Rule) else given), *more)


def keller(learning_rate: ScalarOrSchedule = 0.02, **changes: Any) -> Muon:
    """Keller Jordan's Muon: factor sqrt(max(1, out/in)), no decay, AdamW at a rate of its own.

    Numbers: five Keller steps, momentum 0.95 (EMA, Nesterov), learning rate 0.02, decay 0 (the README of that
    package uses 0.01); AdamW 3e-4, (0.9, 0.95), eps 1e-10 on embeddings, heads, gains and biases.

    Args:
      learning_rate: of the matrices, a number or a schedule.
      **changes: arguments of `muon` to change.

    Returns:
      A `Muon` transformation.

    Raises:
      ValueError, TypeError: as `muon`.

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
    return with_presets(muon(learning_rate, **numbers | changes), numbers.keys() - changes.keys())


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

    Raises:
      ValueError, TypeError: as `muon`.

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

    Raises:
      ValueError, TypeError: as `muon`.

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


def kimi_k2(learning_rate: ScalarOrSchedule = 2e-4, **changes: Any) -> Muon:
    """Kimi K2: Moonlight's numbers at a trillion parameters; chain `qk_clip_transform()` after it for
    MuonClip.

    Numbers: as `moonlight` (five Keller steps, momentum 0.95, factor 0.2 sqrt(max(in, out)), decay 0.1 on
    everything, AdamW (0.9, 0.95), eps 1e-8, same rate). The authors trained MLA with 384 experts, warmed up
    over 500 steps, held 2e-4 for 10T tokens and fell by a cosine to 2e-5, with batches of 67M tokens and
    QK-clip at 100.

    Args:
      learning_rate: a number or a schedule.
      **changes: arguments of `muon` to change.

    Returns:
      A `Muon` transformation.

    Raises:
      ValueError, TypeError: as `muon`.

    Example:
      >>> import optax
      >>> from optax_muon import MultiLatent, qk_clip_transform, recipes
      >>> clip = qk_clip_transform(threshold=100.0, attention=MultiLatent(nope=128, rope=64, value=128))
      >>> muon_clip = optax.chain(recipes.kimi_k2(2e-4), clip)     # update(..., max_logits=...)

    References:
      Kimi K2, arXiv 2507.20534.
    """
    return moonlight(learning_rate, **changes)


def kimi_k3(
    learning_rate: ScalarOrSchedule,
    *,
    head_dim: int | None = 128,
    latent: tuple[int, int, int] | None = (128, 64, 128),
    stored: str = "flat",
    **changes: Any,
) -> Muon:
    """Kimi K3: Moonlight's numbers, queries, keys and values cut into heads, each a matrix of its own.

    Numbers: as `moonlight`; the factor is that of a head's shape. Outputs, gates and down-projections stay
    whole. An up-projection of latent attention is cut into keys and values first. The rate was a cosine whose
    peak is not stated, so it must be given.

    Args:
      learning_rate: a number or a schedule.
      head_dim: width of a head in plain query, key and value weights; None where the model has none.
      latent: (nope, rope, value) widths of latent attention; None where the model has none.
      stored: 'flat' for kernels (.., in, heads * width), 'heads' for (.., in, heads, width), 'out_in' for
        weights (.., heads * width, in).
      **changes: arguments of `muon` to change; `rules` come before those of the recipe.

    Returns:
      A `Muon` transformation.

    Raises:
      ValueError, TypeError: as `muon`.

    Example:
      >>> from optax_muon import recipes
      >>> print(recipes.kimi_k3(2e-4, latent=None).config.rules[0].assignment)
      MatrixView(reduction_axes=-2, output_axes=-1, blocks=contiguous_blocks(-1, 128))

    References:
      Kimi K3, arXiv 2607.24653, as quoted by others; the decay, 0.1, is Moonlight's.
    """
    rules = () if head_dim is None else (per_head(QKV, stored, head_dim),)
    rules += () if latent is None else latent_blocks(*latent, stored)
    return moonlight(learning_rate, **changes | {"rules": _rules(changes, *rules)})


def glm45(learning_rate: ScalarOrSchedule = 2.5e-4, **changes: Any) -> Muon:
    """GLM-4.5: Muon on everything but word embeddings, biases and norms, so on the output head too.

    Numbers: five Keller steps, momentum 0.95, update RMS 0.2, decay 0.1; AdamW on the rest at the same rate.
    The authors fell from 2.5e-4 to 2.5e-5 by a cosine.

    Args:
      learning_rate: a number or a schedule.
      **changes: arguments of `muon` to change.

    Returns:
      A `Muon` transformation.

    Raises:
      ValueError, TypeError: as `muon`.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_muon import describe, recipes
      >>> params = {"embed": {"embedding": jnp.zeros((9, 4))}, "lm_head": {"kernel": jnp.zeros((4, 9))}}
      >>> [row.label for row in describe(params, recipes.glm45()).rows]
      ['adamw', 'muon']

    References:
      GLM-4.5, arXiv 2508.06471.
    """
    numbers = {
        "shape_factor": shape_factors.sqrt_max(0.2),
        "weight_decay": 0.1,
        "param_labels": HeadsToo(_rules(changes)),
    }
    return muon(learning_rate, **numbers | changes)


def glm5(
    learning_rate: ScalarOrSchedule = 2.5e-4,
    *,
    nope: int = 192,
    rope: int = 64,
    value: int = 256,
    stored: str = "flat",
    **changes: Any,
) -> Muon:
    """GLM-5, Muon Split: the up-projections of queries, keys and values are cut into heads, each block alone.

    Numbers: as `glm45`; the factor is that of a block's shape. The rate is GLM-4.5's, as GLM-5's is not
    stated. With the split the authors needed no clipping of logits.

    Args:
      learning_rate: a number or a schedule.
      nope: width of a head's part without position, in queries and keys.
      rope: width of a head's rotary part, in queries.
      value: width of a head's values.
      stored: as in `kimi_k3`.
      **changes: arguments of `muon` to change; `rules` come before those of the recipe.

    Returns:
      A `Muon` transformation.

    Raises:
      ValueError, TypeError: as `muon`.

    Example:
      >>> from optax_muon import recipes
      >>> print(recipes.glm5().config.rules[0].assignment)
      MatrixView(reduction_axes=-2, output_axes=-1, blocks=contiguous_blocks(-1, 256))

    References:
      GLM-5, arXiv 2602.15763.
    """
    rules = _rules(changes, *latent_blocks(nope, rope, value, stored))
    return glm45(learning_rate, **changes | {"rules": rules})


def deepseek_v4(learning_rate: ScalarOrSchedule = 2.7e-4, **changes: Any) -> Muon:
    """DeepSeek-V4: ten steps that land on 1, update RMS 0.18, decay on everything, eps 1e-20.

    Numbers: eight Keller steps and two of (2, -1.5, 0.5); momentum 0.95 (sum form, the same updates as EMA);
    factor 0.18 sqrt(max(in, out)); decay 0.1, norms included; AdamW (0.9, 0.95), eps 1e-20, same rate. The
    authors trained 284B at 2.7e-4 and 1.6T at 2.0e-4, warmed up over 2000 steps, and fell to a tenth by a
    cosine. Every logically independent matrix and every expert is orthogonalised alone.

    Args:
      learning_rate: a number or a schedule.
      **changes: arguments of `muon` to change.

    Returns:
      A `Muon` transformation.

    Raises:
      ValueError, TypeError: as `muon`.

    Example:
      >>> from optax_muon import recipes
      >>> len(recipes.deepseek_v4().config.orthogonalizer.coefficients)
      10

    Note:
      The update RMS is 0.18 while the gradient has full rank, however small its tail. Where singular values
      are exactly zero, `renormalize()` makes it so.

    References:
      DeepSeek-V4, arXiv 2606.19348.
    """
    numbers: dict[str, Any] = {
        "orthogonalizer": Orthogonalizer(coefficients=DEEPSEEK_V4),
        "shape_factor": shape_factors.sqrt_max(0.18),
        "weight_decay": 0.1,
        "weight_decay_mask": None,
        "adamw_eps": 1e-20,
    }
    return muon(learning_rate, **numbers | changes)


def deepspeed(learning_rate: ScalarOrSchedule = 0.02, **changes: Any) -> Muon:
    """DeepSpeed: Keller's numbers; Muon on every matrix whose name holds neither 'embed' nor 'lm_head'.

    Numbers: five Keller steps, momentum 0.95 (EMA, Nesterov), factor sqrt(max(1, out/in)), learning rate
    0.02, no decay; AdamW at a rate of its own (3e-4, (0.9, 0.95), eps 1e-10 are Keller Jordan's). The name
    rule reaches output heads of other names and position tables, too. Experts are orthogonalised alone.

    Args:
      learning_rate: of the matrices, a number or a schedule.
      **changes: arguments of `muon` to change.

    Returns:
      A `Muon` transformation.

    Raises:
      ValueError, TypeError: as `muon`.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_muon import describe, recipes
      >>> params = {"lm_head": {"kernel": jnp.zeros((4, 9))}, "output": {"kernel": jnp.zeros((4, 9))}}
      >>> [row.label for row in describe(params, recipes.deepspeed()).rows]
      ['adamw', 'muon']

    References:
      DeepSpeed 0.19.8. It iterates on the Gram matrix in float16 with a restart before step 2: the same
      polynomial, which `Orthogonalizer(method='gram_newton_schulz', compute_dtype='float16', restarts=(2,))`
      computes so.
    """
    return keller(learning_rate, **{"param_labels": ByName(_rules(changes))} | changes)


def megatron(learning_rate: ScalarOrSchedule, **changes: Any) -> Muon:
    """Megatron-LM with Emerging-Optimizers: other coefficients, no Nesterov, factor 0.2 sqrt(max(in, out)).

    Numbers: the five steps `YOU`, momentum 0.95 (EMA, Nesterov off), scale mode "spectral" with extra factor
    0.2, decoupled decay 0.1, AdamW (0.9, 0.95), eps 1e-8, same rate. Its own default for the extra factor is
    1: give `shape_factor=shape_factors.sqrt_max(1.0)`. No rate is published, so it must be given. Fused QKV
    is split into three whole matrices: give `rules` with blocks.

    Args:
      learning_rate: a number or a schedule.
      **changes: arguments of `muon` to change.

    Returns:
      A `Muon` transformation.

    Raises:
      ValueError, TypeError: as `muon`.

    Example:
      >>> from optax_muon import recipes
      >>> recipes.megatron(5e-4).config.nesterov is None
      True

    References:
      NVIDIA Emerging-Optimizers and Megatron-LM.
    """
    numbers: dict[str, Any] = {
        "orthogonalizer": Orthogonalizer(coefficients=YOU),
        "nesterov": None,
        "shape_factor": shape_factors.sqrt_max(0.2),
        "weight_decay": 0.1,
    }
    return muon(learning_rate, **numbers | changes)


def dion(learning_rate: ScalarOrSchedule = 0.01, *, cautious: bool = False, **changes: Any) -> Muon:
    """Microsoft's dion package, its Muon: Polar Express, no Nesterov, factor sqrt(out/in), decay 0.01.

    Numbers: five steps of Polar Express on a norm times 1.02, momentum 0.95 (sum form, the same updates as
    EMA), learning rate 0.01, AdamW (0.9, 0.95), eps 1e-8, same rate and decay. For its "rms_norm" give
    `shape_factor=shape_factors.sqrt_max(0.2)`; for its `num_heads` and `split_sizes` give `rules` with
    blocks.

    Args:
      learning_rate: a number or a schedule.
      cautious: decay matrices only where update and weight have one sign, its `cautious_wd`.
      **changes: arguments of `muon` to change.

    Returns:
      A `Muon` transformation.

    Raises:
      ValueError, TypeError: as `muon`.

    Example:
      >>> from optax_muon import recipes
      >>> recipes.dion().config.shape_factor
      SqrtRatio(scale=1.0)

    References:
      microsoft/dion, muon.py.
    """
    numbers: dict[str, Any] = {
        "orthogonalizer": MODDED_POLAR_EXPRESS,
        "nesterov": None,
        "shape_factor": shape_factors.sqrt_ratio(),
        "weight_decay": 0.01,
    } | changes
    if cautious:
        decay = add_cautious_decayed_weights(numbers["weight_decay"])
        factor = scale_by_shape(numbers["shape_factor"], rules=numbers.get("rules"))
        numbers["transforms"] = {"muon": muon_chain(learning_rate, numbers, factor, decay)} | (
            numbers.get("transforms") or {}
        )
    return muon(learning_rate, **numbers)


def modded_nanogpt(
    learning_rate: ScalarOrSchedule = 0.023,
    *,
    steps: int | None = None,
    doubled: str | None = None,
    **changes: Any,
) -> Muon:
    """modded-nanogpt (record of early 2026): NorMuon, cautious decay that follows the rate, momentum warm-up.

    Numbers: five steps of Polar Express on a norm times 1.02; momentum from 0.85 to 0.95 over 300 steps and
    back over the last 50; NorMuon over the short side, 0.9; cautious decay 1.2 lr, then the factor
    sqrt(max(1, out/in)), which scales the decay too; learning rate 0.023. Embeddings and heads: AdamW (0.5,
    0.95), eps 1e-10, every second step on the mean of two gradients, rate 0.008/0.023 of Muon's, cautious
    decay 0.75 lr; scalars without decay (the authors use other betas and multiples for some of them).

    Args:
      learning_rate: a number or a schedule.
      steps: length of the run, for the momentum's way back; None leaves it out.
      doubled: pattern of the leaves whose rate is doubled, the authors' MLP outputs, such as
        '.*/mlp/c_proj/kernel'.
      **changes: arguments of `muon` to change.

    Returns:
      A `Muon` transformation.

    Raises:
      ValueError, TypeError: as `muon`.

    Example:
      >>> from optax_muon import recipes
      >>> momentum = recipes.modded_nanogpt(steps=1000).config.momentum
      >>> [round(float(momentum(t)), 3) for t in (0, 150, 300, 950, 975, 1000)]
      [0.85, 0.9, 0.95, 0.95, 0.9, 0.85]

    References:
      KellerJordan/modded-nanogpt, train_gpt.py; NorMuon, arXiv 2510.05491; cautious decay, arXiv 2510.12402.
    """
    numbers: dict[str, Any] = {
        "momentum": there_and_back(0.85, 0.95, 300, 50, steps),
        "orthogonalizer": MODDED_POLAR_EXPRESS,
        "shape_factor": shape_factors.sqrt_ratio_min_one(),
        "weight_decay": 1.2,
        "adamw_learning_rate": times(learning_rate, 0.008 / 0.023),
        "adamw_b1": 0.5,
        "adamw_eps": 1e-10,
        "adamw_weight_decay": 0.75,
    } | changes
    rules = numbers["rules"] = _rules(changes, *([Rule(doubled, "doubled")] if doubled else ()))
    decay = add_cautious_decayed_weights(times(learning_rate, numbers["weight_decay"]))
    factor = scale_by_shape(numbers["shape_factor"], rules=rules)
    parts = (scale_by_normuon(beta2=0.9, epsilon=1e-5, over="short_side", rules=rules), decay, factor)
    chains = {
        "muon": muon_chain(learning_rate, numbers, *parts),
        "doubled": muon_chain(times(learning_rate, 2.0), numbers, *parts),
        "adamw": every_second_step(numbers),
    }
    numbers["transforms"] = chains | (numbers.get("transforms") or {})
    return with_presets(muon(learning_rate, **numbers), numbers.keys() - changes.keys())
