"""What the recipes are built of beside numbers: rules, labels, schedules and chains. Internal."""

import dataclasses
import re
from typing import Any

import jax
import optax

from optax_muon.orthogonalization import POLAR_EXPRESS_5, Frobenius, Orthogonalizer
from optax_muon.parameters import Decision, MatrixView, Rule, contiguous_blocks, decide
from optax_muon.transforms import add_cautious_decayed_weights, scale_by_muon
from optax_muon.transforms._checks import check_choice

QKV = r"query|key|value|[qkv]|[qkv]_proj|to_[qkv]|w[qkv]|linear_[qkv]|(?:query|key|value)_proj"
_QUERY_UP = r"q_up|q_b_proj|query_up|wq_b"
_KEY_VALUE_UP = r"kv_up|kv_b_proj|key_value_up|wkv_b"
MODDED_POLAR_EXPRESS = Orthogonalizer(coefficients=POLAR_EXPRESS_5, normalization=Frobenius(safety=1.02))


def per_head(names: str, stored: str, *widths: int) -> Rule:
    """Heads of these widths in every weight of these names: a block each, and so is each part of a head."""
    check_choice("stored", stored, ("flat", "heads", "out_in"))
    for width in widths:
        if not isinstance(width, int) or width < 2:
            raise ValueError(f"a head's part has width {width!r}; blocks of one row or less are no matrices.")
    axis = -2 if stored == "out_in" else -1
    heads = contiguous_blocks(-2, 1) if stored == "heads" else contiguous_blocks(axis, sum(widths))
    blocks = heads if len(widths) == 1 else (heads, contiguous_blocks(axis, widths))
    view = {
        "flat": MatrixView(-2, -1, blocks),
        "heads": MatrixView(-3, (-2, -1), blocks),
        "out_in": MatrixView(-1, -2, blocks),
    }[stored]
    return Rule(rf"(?:.*/)?(?:{names})(?:/(?:kernel|weight|w))?", view, "each head alone")


def latent_blocks(nope: int, rope: int, value: int, stored: str) -> tuple[Rule, ...]:
    """The up-projections of latent attention: queries per head; keys and values per head and apart."""
    return (per_head(_QUERY_UP, stored, nope + rope), per_head(_KEY_VALUE_UP, stored, nope, value))


@dataclasses.dataclass(frozen=True)
class HeadsToo:
    """Labels: Muon on output heads beside the hidden matrices."""

    rules: tuple[Rule, ...] = ()

    def __call__(self, params: Any) -> Any:
        """The labels by path; None leaves the choice to the rules."""
        return {d.path: "muon" if d.role == "head" else None for d in decide(params, self.rules)}


@dataclasses.dataclass(frozen=True)
class ByName:
    """Labels: Muon on every matrix whose path holds neither 'embed' nor 'lm_head'."""

    rules: tuple[Rule, ...] = ()

    def __call__(self, params: Any) -> Any:
        """The labels by path; None leaves the choice to the rules."""
        return {d.path: self._label(d) for d in decide(params, self.rules)}

    def _label(self, decision: Decision) -> str | None:
        if re.search("embed|lm_head", decision.path, re.IGNORECASE):
            return "adamw"
        return "muon" if len(decision.shape) >= 2 and decision.role in ("head", "embedding") else None


def times(rate: Any, multiple: Any, every: int = 1) -> Any:
    """A multiple of a rate or schedule; of a schedule asked only every so many steps, at the last of them."""
    if not callable(rate):
        return rate * multiple
    return lambda count: rate(every * count + every - 1) * multiple


def there_and_back(low: float, high: float, up: int, down: int, steps: int | None) -> Any:
    rise = optax.linear_schedule(low, high, up)
    if steps is None:
        return rise
    return optax.join_schedules([rise, optax.linear_schedule(high, low, down)], [steps - down])


_MOMENTUM = ("momentum", "nesterov", "orthogonalizer", "mu_dtype", "rules", "wire_dtype")
_PLACEMENT = ("mesh_axes", "param_specs", "pmap_axis_name", "manual_batch_axes")


def muon_chain(
    learning_rate: Any, numbers: dict[str, Any], *parts: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Muon's chain with other parts between the orthogonalisation and the rate."""
    given = {name: numbers[name] for name in (*_MOMENTUM, *_PLACEMENT) if name in numbers}
    return optax.chain(scale_by_muon(**given), *parts, optax.scale_by_learning_rate(learning_rate))


def every_second_step(numbers: dict[str, Any]) -> optax.GradientTransformationExtraArgs:
    """AdamW on the mean of two gradients, with cautious decay of embeddings and heads."""
    rate = times(numbers["adamw_learning_rate"], 1.0, every=2)
    decayed = lambda params: jax.tree.unflatten(
        jax.tree.structure(params),
        [d.role in ("embedding", "head") for d in decide(params, numbers["rules"])],
    )
    adamw = optax.chain(
        optax.scale_by_adam(numbers["adamw_b1"], numbers.get("adamw_b2", 0.95), numbers["adamw_eps"]),
        add_cautious_decayed_weights(times(rate, numbers["adamw_weight_decay"]), decayed),
        optax.scale_by_learning_rate(rate),
    )
    return optax.with_extra_args_support(optax.MultiSteps(adamw, 2).gradient_transformation())
