"""QK-clip: attention weights are scaled down, head by head, where a logit exceeded a threshold."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_muon.parameters import Decision, Rule, decide, leaf_paths
from optax_muon.sharding import reshard_like
from optax_muon.transforms._attention_layouts import Attention, AttentionLayout, MultiHead, find_attentions
from optax_muon.transforms._checks import check_choice, check_instance, is_number
from optax_muon.transforms._replicate import replicate


def _components(path: str) -> list[str]:
    parts = [part for part in path.split("/") if part]
    # Linen names its collections at the root; they differ between params and what was sown.
    return parts[1:] if parts[:1] in (["params"], ["intermediates"]) else parts


def _logits_of(attentions: Sequence[Attention], max_logits: Any) -> dict[str, jax.Array]:
    """The recorded maximum of each attention: of the entries of the tree at or below its path."""
    leaves, paths = jax.tree.leaves(max_logits), leaf_paths(max_logits)
    if not leaves:
        raise ValueError(
            "max_logits has no array. Give {path of the attention: array [heads]}, for example "
            f"{{{attentions[0].path!r}: ...}}; max_attention_logits computes one."
        )
    found: dict[str, jax.Array] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        at = _components(path)
        owners = [a for a in attentions if at[: len(_components(a.path))] == _components(a.path)]
        if not at and len(attentions) == 1:
            owners = list(attentions)
        if not owners:
            known = ", ".join(f"`{a.path}`" for a in attentions)
            raise ValueError(f"max_logits has an entry `{path}`, but the attentions of params are {known}.")
        owner = max(owners, key=lambda a: len(a.path)).path
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise TypeError(
                f"max_logits entry `{path}` has dtype {jnp.result_type(leaf)}; it must be floating."
            )
        leaf = replicate(jnp.asarray(leaf, jnp.promote_types(jnp.float32, jnp.result_type(leaf))))
        # A call that recorded twice (two uses of one attention, two micro-batches) has its maximum in either.
        found[owner] = jnp.maximum(found[owner], leaf) if owner in found else leaf
    return found


def clip_factor(max_logits: jax.Array, threshold: Any) -> jax.Array:
    """The factor tau / S where S is finite and above tau, else exactly 1."""
    clipped = jnp.isfinite(max_logits) & (max_logits > threshold)
    return jnp.where(clipped, threshold / jnp.where(clipped, max_logits, 1), 1)


def _factors(
    params: Any, max_logits: Any, threshold: Any, layout: AttentionLayout, rules: Any, normalized: str
) -> dict[int, jax.Array]:
    """{index of a leaf: what it is multiplied by, as an array that broadcasts against it}."""
    decisions = decide(params, rules)
    attentions = find_attentions(decisions, layout)
    if not attentions:
        raise ValueError(
            f"qk_clip found no attention in params: no leaf lies under {layout.describe()}. Say how your "
            f"query and key weights are called: attention={type(layout).__name__}(...)."
        )
    factors: dict[int, jax.Array] = {}
    for path, logits in _logits_of(attentions, max_logits).items():
        attention = next(a for a in attentions if a.path == path)
        if attention.norms and normalized == "raise":
            raise ValueError(
                f"`{path}` normalises its queries or keys (`{decisions[attention.norms[0].index].path}`), "
                f"which undoes any scaling of their weights: clipping them would change nothing. Leave "
                f"QK-clip out for this attention, or scale the gains of the norms instead with "
                f"normalized='gains'."
            )
        gamma = clip_factor(logits, threshold)
        for index, head, exponent, axes in attention.scalings(decisions, gamma.shape):
            by_position = jnp.min(gamma, -1, keepdims=True) if head is None else gamma[..., head]
            factor = by_position ** jnp.asarray(exponent, gamma.dtype)
            factors[index] = _broadcastable(factor, axes, decisions[index])
    return factors


def _broadcastable(factor: jax.Array, axes: tuple[int, ...], decision: Decision) -> jax.Array:
    """[*stack, positions], whose axes are `axes` of the leaf, as an array of the leaf's rank."""
    shape = decision.shape
    stack = factor.ndim - 1
    factor = jnp.broadcast_to(factor, (*factor.shape[:-1], int(np.prod([shape[a] for a in axes[stack:]]))))
    factor = factor.reshape(tuple(shape[a] for a in axes)).transpose(np.argsort(axes))
    return jnp.expand_dims(factor, [a for a in range(len(shape)) if a not in axes])


def _except_untouched(old: jax.Array, new: jax.Array, factor: jax.Array) -> jax.Array:
    """`new` in the dtype of `old`; `old` itself, bit by bit, where the factor is 1."""
    untouched = reshard_like(jnp.broadcast_to(factor == 1, old.shape), old)
    return jnp.where(untouched, old, reshard_like(new.astype(old.dtype), old))


def _scaled(x: jax.Array, factor: jax.Array) -> jax.Array:
    dtype = jnp.promote_types(jnp.float32, x.dtype)
    return _except_untouched(x, x.astype(dtype) * factor.astype(dtype), factor)


def _check(threshold: Any, attention: Any, normalized: Any, rules: Any) -> None:
    if isinstance(threshold, bool | str) or threshold is None:
        raise TypeError(f"threshold must be a positive number, got {threshold!r}.")
    if is_number(threshold) and not (np.isfinite(threshold) and threshold > 0):
        raise ValueError(f"threshold must be finite and positive, got {threshold!r}.")
    if not isinstance(attention, AttentionLayout):
        raise TypeError(
            f"attention must be MultiHead(...), MultiLatent(...) or FusedHeads(...), got {attention!r}."
        )
    check_choice("normalized", normalized, ("raise", "gains"))
    for rule in rules or ():
        check_instance("rules", rule, Rule, "a sequence of optax_muon.Rule")


def qk_clip(
    params: Any,
    max_logits: Any,
    *,
    threshold: float | jax.Array = 100.0,
    attention: AttentionLayout = MultiHead(),  # noqa: B008  (a frozen value)
    normalized: str = "raise",
    rules: Sequence[Rule] | None = None,
) -> Any:
    r"""Scales query and key weights so that no head's logits exceed the threshold. Applied after the
    optimizer's step.

    Formula, for each head h whose largest logit S_h in this step's forward pass exceeds tau, with gamma = tau
    / S_h:

        MHA:  W_q <- gamma^(1/2) W_q,   W_k <- gamma^(1/2) W_k                    (biases alike)
        GQA:  W_q <- gamma W_q                       (keys are shared in a group, so they stay)
        MLA:  W_q and W_k without position <- gamma^(1/2) W,   W_q with rotary position <- gamma W_q

    With the same inputs and otherwise unchanged weights, that head's largest logit is then exactly tau. Every
    other head keeps its bits; so does a head whose S_h is negative, infinite or NaN.

    Args:
      params: any tree of parameters: Linen, NNX or Equinox.
      max_logits: S, the maximum over batch and positions of the logits before the softmax: a tree whose paths
        begin with the path of an attention, such as {'block_0/attention': [heads]} or what the model
        recorded, or one array where there is one attention. Float [*stack, heads], where stack are the batch
        axes of a scanned attention. Attentions that it does not name stay as they are.
      threshold: tau, positive.
      attention: how queries and keys are stored: `MultiHead(...)` (MHA and GQA, told apart by the shapes),
        `MultiLatent(nope=, rope=, value=)` or `FusedHeads(...)`.
      normalized: with normalised queries or keys, scaling the weights does nothing: 'raise', or 'gains' to
        scale the gains of the norms (for all heads that share a gain by the least factor among them).
      rules: the rules given to `muon`, which tell the axes of each weight.

    Returns:
      The same tree with the same dtypes and shardings. Runs under jit.

    Raises:
      ValueError: no attention in params, an entry of max_logits that belongs to none, a number of heads that
        does not divide the weights, logits of the wrong shape, normalised queries or keys.
      TypeError: arguments of another kind.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_muon import qk_clip
      >>> kernels = {name: {"kernel": jnp.ones((4, 2, 1))} for name in ("query", "key")}
      >>> params = {"attention": kernels}
      >>> clipped = qk_clip(params, {"attention": jnp.array([50.0, 400.0])}, threshold=100.0)
      >>> clipped["attention"]["query"]["kernel"][0, :, 0].tolist()
      [1.0, 0.5]

    Note:
      The momentum is not scaled. Gains that a model stores as 1 + g cannot be scaled so.

    References:
      Kimi K2, arXiv 2507.20534, section 2.1 and algorithm 1.
    """
    _check(threshold, attention, normalized, rules)
    leaves, treedef = jax.tree.flatten(params)
    for index, factor in _factors(params, max_logits, threshold, attention, rules, normalized).items():
        leaves[index] = _scaled(leaves[index], factor)
    return treedef.unflatten(leaves)


def qk_clip_transform(
    *,
    threshold: float | jax.Array = 100.0,
    attention: AttentionLayout = MultiHead(),  # noqa: B008  (a frozen value)
    normalized: str = "raise",
    rules: Sequence[Rule] | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""`qk_clip` as the last link of an `optax.chain`: `update(gradients, state, params, max_logits=...)`.

    Formula: the update u of a query or key weight w becomes `clip(w + u) - w`, so that applying it gives the
    clipped weight.

    Args:
      threshold: as in `qk_clip`.
      attention: as in `qk_clip`.
      normalized: as in `qk_clip`.
      rules: as in `qk_clip`.

    Returns:
      A stateless `GradientTransformationExtraArgs`. Updates keep their shapes, dtypes and shardings; those of
      heads that are not clipped keep their bits. `update` needs the params and the extra argument
      `max_logits`.

    Raises:
      ValueError, TypeError: as `qk_clip`, and at `update` without params or max_logits.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from optax_muon import muon, qk_clip_transform
      >>> optimizer = optax.chain(muon(1e-3), qk_clip_transform(threshold=100.0))
      >>> kernels = {name: {"kernel": jnp.ones((4, 2, 1))} for name in ("query", "key")}
      >>> params = {"attention": kernels}
      >>> gradients, logits = jax.tree.map(jnp.zeros_like, params), {"attention": jnp.array([50.0, 400.0])}
      >>> updates, _ = optimizer.update(gradients, optimizer.init(params), params, max_logits=logits)
      >>> params = optax.apply_updates(params, updates)
      >>> [round(x, 3) for x in params["attention"]["query"]["kernel"][0, :, 0].tolist()]
      [1.0, 0.5]

    References:
      Kimi K2, arXiv 2507.20534, algorithm 1.
    """
    _check(threshold, attention, normalized, rules)

    def init(params: optax.Params) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update(
        updates: optax.Updates,
        state: Any,
        params: Any = None,
        *,
        max_logits: Any = None,
        **extra_args: Any,
    ):
        del extra_args
        if params is None or max_logits is None:
            missing = "params" if params is None else "max_logits"
            raise ValueError(
                f"qk_clip_transform needs {missing}: call update(gradients, state, params, max_logits=...) "
                f"with the largest logit of each head in this step's forward pass; optax.chain passes it on."
            )
        leaves, treedef = jax.tree.flatten(updates)
        weights = jax.tree.leaves(params)
        for index, factor in _factors(params, max_logits, threshold, attention, rules, normalized).items():
            u, w = leaves[index], weights[index]
            dtype = jnp.promote_types(jnp.float32, w.dtype)
            moved = factor.astype(dtype) * (w.astype(dtype) + u.astype(dtype)) - w.astype(dtype)
            leaves[index] = _except_untouched(u, moved, factor)
        return treedef.unflatten(leaves), state

    return optax.GradientTransformationExtraArgs(init, update)
