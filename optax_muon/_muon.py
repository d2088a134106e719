"""`muon`: optax.multi_transform of the Muon chain and optax.adamw, in a thin wrapper that decides once."""

import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_muon.orthogonalization import Orthogonalizer
from optax_muon.parameters import Decision, Rule, by_path, decays, decide, leaf_paths
from optax_muon.sharding import constrain, is_spec, like_param, reshard_like
from optax_muon.transforms import shape_factors
from optax_muon.transforms._checks import (
    check_choice,
    check_instance,
    check_not_negative,
    check_unit_interval,
    is_number,
)
from optax_muon.transforms._momentum import is_momentum, on_mesh_of
from optax_muon.transforms._scale_by_muon import (
    Nesterov,
    ScaleByMuonState,
    check_arguments,
    scale_by_orthogonal_momentum,
)
from optax_muon.transforms._scale_by_shape import ShapeFactor, scale_by_views
from optax_muon.transforms._views import views_from_decisions

ScalarOrSchedule = float | jax.Array | optax.Schedule
MUON, ADAMW, FROZEN = "muon", "adamw", "frozen"


@dataclass(frozen=True)
class MuonConfig:
    """The arguments of `muon`, as given; read by `describe`. `presets` are those that a recipe gave, not its user."""

    learning_rate: ScalarOrSchedule
    momentum: ScalarOrSchedule
    nesterov: Nesterov
    orthogonalizer: Orthogonalizer
    shape_factor: ShapeFactor | None
    weight_decay: ScalarOrSchedule
    weight_decay_mask: Any
    mu_dtype: Any
    rules: tuple[Rule, ...] | None
    param_labels: Any
    transforms: Mapping[str, optax.GradientTransformation] | None
    adamw_learning_rate: ScalarOrSchedule | None
    adamw_b1: float | jax.Array
    adamw_b2: float | jax.Array
    adamw_eps: float | jax.Array
    adamw_weight_decay: ScalarOrSchedule | None
    adamw_nesterov: bool
    mesh_axes: tuple[str, ...] | None
    param_specs: Any
    wire_dtype: Any
    pmap_axis_name: str | None
    manual_batch_axes: tuple[str, ...]
    presets: frozenset[str] = frozenset()


class Muon(optax.GradientTransformationExtraArgs):
    """What `muon` returns: a `GradientTransformationExtraArgs` that also knows its `config`.

    Two with equal configurations are equal and hash alike, so that rebuilding one does not recompile a
    function that takes it as a static argument.

    Attributes:
      init, update: as in any Optax transformation.
      config: the arguments, frozen, by their names.
    """

    config: MuonConfig

    def __new__(cls, init: Callable, update: Callable, config: MuonConfig):
        self = super().__new__(cls, init, update)
        self.config = config
        return self

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Muon) and self.config == other.config)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        try:
            return hash(self.config)
        except TypeError:  # a label tree or an array among the arguments
            return id(self)


@dataclass(frozen=True)
class Routing:
    """What was decided for a tree of parameters, leaf by leaf."""

    decisions: tuple[Decision, ...]
    decayed: tuple[bool, ...]

    @property
    def labels(self) -> list[str]:
        return [d.label for d in self.decisions]


def _route(config: MuonConfig, params: Any) -> Routing:
    decisions = decide(params, config.rules, config.param_labels)
    known = {MUON, ADAMW, FROZEN, *(config.transforms or {})}
    for d in decisions:
        if d.label not in known:
            raise ValueError(
                f"`{d.path}` has the label {d.label!r}, for which there is no transformation. Add "
                f"transforms={{{d.label!r}: ...}} to muon, or use one of {sorted(known)}."
            )
    mask = config.weight_decay_mask
    if mask is None:
        decayed = [True] * len(decisions)
    elif isinstance(mask, str):
        decayed = [decays(d) for d in decisions]
    else:
        values = by_path(mask, params, "weight_decay_mask", lambda x: isinstance(x, bool))
        decayed = [bool(v) for v in values]
    return Routing(decisions, tuple(decayed))


def _two_chains(config: MuonConfig, routing: Routing, treedef: Any) -> optax.GradientTransformationExtraArgs:
    """The optimizer itself: one transformation per label, and the labels as a tree."""
    views_of = views_from_decisions(routing.decisions)
    mask = treedef.unflatten(routing.decayed)
    muon_chain = optax.chain(
        scale_by_orthogonal_momentum(
            views_of,
            momentum=config.momentum,
            nesterov=config.nesterov,
            orthogonalizer=config.orthogonalizer,
            mu_dtype=config.mu_dtype,
            mesh_axes=config.mesh_axes,
            param_specs=config.param_specs,
            wire_dtype=config.wire_dtype,
            pmap_axis_name=config.pmap_axis_name,
            manual_batch_axes=config.manual_batch_axes,
        ),
        optax.identity() if config.shape_factor is None else scale_by_views(config.shape_factor, views_of),
        optax.add_decayed_weights(config.weight_decay, mask),
        optax.scale_by_learning_rate(config.learning_rate),
    )
    rate, decay = _adamw_rate_and_decay(config)
    adamw = optax.adamw(
        rate,
        b1=config.adamw_b1,
        b2=config.adamw_b2,
        eps=config.adamw_eps,
        weight_decay=decay,
        mask=mask,
        nesterov=config.adamw_nesterov,
    )
    transforms: dict[Hashable, Any] = {
        MUON: muon_chain,
        ADAMW: adamw,
        FROZEN: optax.set_to_zero(),
        **dict(config.transforms or {}),
    }
    labels = treedef.unflatten(routing.labels)
    # A constant function, because multi_transform would call a label tree that is an Equinox module.
    return optax.multi_transform(transforms, lambda _: labels)


def _adamw_rate_and_decay(config: MuonConfig) -> tuple[Any, Any]:
    """AdamW's learning rate and decay, which are Muon's unless given."""
    rate = config.learning_rate if config.adamw_learning_rate is None else config.adamw_learning_rate
    decay = config.weight_decay if config.adamw_weight_decay is None else config.adamw_weight_decay
    return rate, decay


def _is_hole(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)


def _is_state_leaf(x: Any) -> bool:
    """Whether x stands for one parameter in a state, though jax.tree would take it apart."""
    return _is_hole(x) or is_momentum(x)


def _init(config: MuonConfig, memo: dict, params: Any) -> Any:
    treedef = jax.tree.structure(params)
    routing = _route(config, params)
    memo[_signature(params)] = routing
    if routing.labels and ADAMW not in routing.labels:
        for name in ("adamw_learning_rate", "adamw_weight_decay"):
            if getattr(config, name) is not None and name not in config.presets:
                warnings.warn(f"{name} was given, but no parameter is trained with AdamW.", stacklevel=3)
    optimizer = _two_chains(config, routing, treedef)
    # AdamW makes its state with zeros_like, which under jit forgets the sharding of the parameter.
    return optax.tree.map_params(
        optimizer,
        lambda s, p: like_param(s, p) if hasattr(s, "shape") and s.shape == jnp.shape(p) else s,
        optimizer.init(params),
        params,
        transform_non_params=lambda s: on_mesh_of(s, params) if isinstance(s, jax.Array) else s,
        is_leaf=_is_state_leaf,
    )


def _signature(params: Any) -> tuple:
    # NumPy's shape, which is () for a function: it will be named as a parameter without a gradient.
    return tuple(zip(leaf_paths(params), map(np.shape, jax.tree.leaves(params)), strict=True))


def _momentum(state: Any) -> Any:
    """The momentum of Muon's half, whose holes record how `init` routed each leaf; None if it keeps none."""
    is_state = lambda x: isinstance(x, ScaleByMuonState)
    found = [x for x in jax.tree.leaves(state.inner_states[MUON], is_leaf=is_state) if is_state(x)]
    return found[0].mu if found else None


def _entries(kept: Any, tree: Any) -> tuple[list[Any], Any]:
    """What a tree in the state holds for each leaf of `tree`, and the tree structure of these leaves.

    The holes that our own routing left are entries; those that an outer wrapper cut into `tree` are not.
    """
    entries, treedef = jax.tree.flatten(kept, is_leaf=_is_state_leaf)
    outer = [_is_hole(x) for x in jax.tree.leaves(tree, is_leaf=_is_hole)]
    if not any(outer) or len(outer) != len(entries):
        return entries, treedef
    inner = treedef.unflatten([optax.MaskedNode() if hole else 0 for hole in outer])
    return [x for x, hole in zip(entries, outer, strict=True) if not hole], jax.tree.structure(inner)


def _routing_for_update(config: MuonConfig, memo: dict, state: Any, tree: Any) -> tuple[Routing, Any]:
    """What `init` decided, and the tree structure of its parameters.

    An update can see less than `init` did: gradients, or parameters stripped of boxes, axis names and module
    types (nnx.Optimizer strips them). So the decision of `init` in this process stands; for a restored state
    it is taken anew. Either way it must agree with the holes in the momentum: a leaf is never silently
    re-routed.
    """
    mu = _momentum(state)
    remembered = memo.get(_signature(tree))
    if mu is None:  # a chain of the user's own, which leaves no record
        return remembered or _route(config, tree), jax.tree.structure(tree)
    held, treedef = _entries(mu, tree)
    on_muon = [not _is_hole(m) for m in held]
    if remembered is not None and [label == MUON for label in remembered.labels] == on_muon:
        return remembered, treedef
    routing = _route(config, tree)
    if len(on_muon) != len(routing.labels):
        raise ValueError(
            f"The optimizer state was made for {len(on_muon)} parameters, but this update has "
            f"{len(routing.labels)}. Call init on the parameters that are trained."
        )
    for d, was_muon in zip(routing.decisions, on_muon, strict=True):
        if (d.label == MUON) != was_muon:
            before, now = (MUON, d.label) if was_muon else ("not muon", MUON)
            raise ValueError(
                f"`{d.path}` was routed to {before} when the state was made, but now to {now} ({d.because}). "
                f"Pass params as `init` saw them to update(gradients, state, params), or pin the leaf with "
                f"rules=[Rule({d.path!r}, ...)]."
            )
    return routing, treedef


def _check_same_leaves(updates: Any, params: Any) -> None:
    """Raises unless gradients and parameters have the same leaves and shapes."""
    of_updates, of_params = _signature(updates), _signature(params)
    if of_updates == of_params:
        return
    shapes_u, shapes_p = dict(of_updates), dict(of_params)
    for path, shape in of_params:
        if path not in shapes_u:
            raise ValueError(
                f"`{path}` is a parameter, but has no gradient (None or missing). Differentiate with respect "
                f"to it, or leave it out of the parameters too, e.g. with equinox.filter or optax.masked."
            )
        if shapes_u[path] != shape:
            raise ValueError(
                f"`{path}` has shape {shape}, but its gradient has shape {shapes_u[path]}. Average "
                f"per-example gradients before the update."
            )
    path = next(
        (path for path, _ in of_updates if path not in shapes_p), of_updates[0][0] if of_updates else ""
    )
    raise ValueError(f"`{path}` has a gradient, but is no parameter (None or missing, or in another order).")


def _like(x: Any, p: Any, home: Any) -> jax.Array:
    """X in the dtype of its parameter and the sharding of `home`; zero for a parameter that is not trained."""
    if not jnp.issubdtype(jnp.result_type(p), jnp.inexact):
        integer = bool if jnp.result_type(p) == jax.dtypes.float0 else jnp.result_type(p)
        return jnp.zeros(jnp.shape(p), integer)
    return reshard_like(jnp.asarray(x).astype(jnp.result_type(p)), home)


def _homes(state: Any, tree: Any, labels: list[str]) -> list[Any]:
    """For each leaf an array that lies where its state does: AdamW's first moment, otherwise the parameter.

    The moments may be cut over more devices than the parameter (ZeRO-1).
    """
    weights = jax.tree.leaves(tree)
    is_adam = lambda x: isinstance(x, optax.ScaleByAdamState)
    for node in jax.tree.leaves(state.inner_states[ADAMW], is_leaf=is_adam):
        if is_adam(node):
            moments, _ = _entries(node.mu, tree)
            if len(moments) == len(weights):
                return [
                    m if label == ADAMW and jnp.shape(m) == jnp.shape(w) else w
                    for m, w, label in zip(moments, weights, labels, strict=True)
                ]
    return weights


def _as_specified(config: MuonConfig, steps: list[jax.Array], tree: Any) -> list[jax.Array]:
    """The updates where `param_specs` says that the parameters lie; on an Auto mesh under jit nothing else does."""
    if config.param_specs is None:
        return steps
    specs = by_path(config.param_specs, tree, "param_specs", is_spec)
    return [x if spec is None else constrain(x, spec) for x, spec in zip(steps, specs, strict=True)]


def _update(
    config: MuonConfig, memo: dict, updates: Any, state: Any, params: Any, extra_args: Mapping[str, Any]
) -> Any:
    if params is None:
        decay = (config.weight_decay, _adamw_rate_and_decay(config)[1])
        if not all(is_number(d) and d == 0 for d in decay):
            raise ValueError(
                f"muon decays weights (weight_decay={config.weight_decay!r}), so it needs them: call "
                f"update(gradients, state, params), or build it with weight_decay=0.0."
            )
    else:
        _check_same_leaves(updates, params)
    tree = updates if params is None else params
    routing, treedef = _routing_for_update(config, memo, state, tree)
    gradients, structure = jax.tree.flatten(updates)
    weights = jax.tree.leaves(tree)
    homes = _homes(state, tree, routing.labels)
    gradients = [_like(g, p, home) for g, p, home in zip(gradients, weights, homes, strict=True)]
    if params is None:  # decay is zero, and so are its stand-ins
        nearby = weights = [jnp.zeros_like(g) for g in gradients]
    else:
        nearby = [_like(p, p, home) for p, home in zip(weights, homes, strict=True)]
    result, state = _two_chains(config, routing, treedef).update(
        treedef.unflatten(gradients), state, treedef.unflatten(nearby), **extra_args
    )
    steps = [_like(u, p, p) for u, p in zip(jax.tree.leaves(result), weights, strict=True)]
    return structure.unflatten(_as_specified(config, steps, tree)), state


def muon(
    learning_rate: ScalarOrSchedule,
    *,
    momentum: ScalarOrSchedule = 0.95,
    nesterov: Nesterov = "torch",
    orthogonalizer: Orthogonalizer = Orthogonalizer(),  # noqa: B008  (a frozen value)
    shape_factor: ShapeFactor | None = shape_factors.sqrt_max(0.2),  # noqa: B008
    weight_decay: ScalarOrSchedule = 0.1,
    weight_decay_mask: Any = "no_norms_or_biases",
    mu_dtype: Any = None,
    rules: Rule | Sequence[Rule] | None = None,
    param_labels: Any = None,
    transforms: Mapping[str, optax.GradientTransformation] | None = None,
    adamw_learning_rate: ScalarOrSchedule | None = None,
    adamw_b1: float | jax.Array = 0.9,
    adamw_b2: float | jax.Array = 0.95,
    adamw_eps: float | jax.Array = 1e-8,
    adamw_weight_decay: ScalarOrSchedule | None = None,
    adamw_nesterov: bool = False,
    mesh_axes: Sequence[str] | None = None,
    param_specs: Any = None,
    wire_dtype: Any = None,
    pmap_axis_name: str | None = None,
    manual_batch_axes: Sequence[str] = (),
) -> Muon:
    r"""Muon on the hidden weight matrices, AdamW on everything else.

    Formula, for a hidden matrix W (fan_in x fan_out) with gradient G, and the defaults of the Moonlight
    recipe:

        M <- 0.95 M + 0.05 G
        O = msign(0.05 G + 0.95 M)                                  (five Newton-Schulz steps)
        W <- W - lr (0.2 sqrt(max(fan_in, fan_out)) O + 0.1 W)

    Embeddings, output heads, norms, biases and scalars take `optax.adamw(lr, 0.9, 0.95, 1e-8)`. The two
    halves share the learning rate and the decay unless `adamw_learning_rate` or `adamw_weight_decay` are
    given; 0.2 sqrt(max(...)) gives both halves the same update RMS, so a tuned AdamW learning rate carries
    over. `describe(params)` lists every decision.

    Args:
      learning_rate: a number or a schedule of the step (from 0); both halves follow it.
      momentum: of Muon, in [0, 1), a number or a schedule, for example 0.85 to 0.95 over the warm-up.
      nesterov: 'torch', 'optax' or None, as in `scale_by_muon`.
      orthogonalizer: how matrices are orthogonalised.
      shape_factor: a value of `shape_factors`, or None for 1.
      weight_decay: decoupled, times the base learning rate (never the shape factor); a number or a schedule.
      weight_decay_mask: 'no_norms_or_biases', None for everything, or a tree (any container, matched by path)
        or callable of booleans. It reaches both halves.
      mu_dtype: of Muon's momentum: a floating dtype, None for each parameter's own, or 'int8', as in
        `scale_by_muon`.
      rules: `Rule`s that come before the built-in ones. First match wins.
      param_labels: labels that override the rules: a tree or prefix in any container, or a callable of the
        parameters. The built-in labels are 'muon', 'adamw' and 'frozen' (zero updates, no state).
      transforms: {label: transformation} for labels of your own, or in place of ours: a chain under 'muon'
        replaces Muon's (momentum, factor, decay and rate included), one under 'adamw' replaces AdamW.
      adamw_learning_rate: AdamW's learning rate or schedule; None for Muon's.
      adamw_b1: first-moment decay of AdamW.
      adamw_b2: second-moment decay of AdamW.
      adamw_eps: epsilon of AdamW.
      adamw_weight_decay: AdamW's decay; None for Muon's. Zero means zero.
      adamw_nesterov: Nesterov momentum in the AdamW half (Muon's `nesterov` does not reach it).
      mesh_axes: mesh axes over which matrices are spread; None for all.
      param_specs: tree of PartitionSpec or NamedSharding for Auto meshes, whose types do not tell the spec
        under jit.
      wire_dtype: what a matrix is rounded to before it travels, with or without a mesh; None for the matmul
        dtype.
      pmap_axis_name: axis of an enclosing pmap over whose replicas the matrices are divided.
      manual_batch_axes: axes of an enclosing shard_map that shard layers or experts.

    Returns:
      A `GradientTransformationExtraArgs` with a frozen `.config`. Updates and state keep the shapes, dtypes
      and shardings of the parameters. Integer, boolean and float0 leaves get zero updates and no state.

    Raises:
      ValueError, TypeError: at construction for numbers out of range; at `init` for a leaf of rank 3 or more
        that no rule knows (with lines to paste); at `update` for gradients that do not fit the parameters or
        the state.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import optax_muon
      >>> hidden = {"kernel": jnp.ones((8, 4)), "bias": jnp.zeros(4)}
      >>> params = {"hidden": hidden, "lm_head": {"kernel": jnp.ones((4, 2))}}
      >>> optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax_muon.muon(3e-3))
      >>> state = optimizer.init(params)
      >>> gradients = jax.tree.map(jnp.ones_like, params)
      >>> updates, state = optimizer.update(gradients, state, params)
      >>> params = optax.apply_updates(params, updates)
      >>> optax_muon.param_labels(params)["hidden"]
      {'bias': 'adamw', 'kernel': 'muon'}

    Note:
      State: one momentum per matrix, where AdamW keeps two.

    References:
      Moonlight, arXiv 2502.16982; Jordan et al., "Muon: an optimizer for hidden layers in neural networks",
      2024.
    """
    given: dict[str, Any] = dict(locals())
    given["rules"] = [rules] if isinstance(rules, Rule) else rules
    # Lists become tuples, so that equal configurations hash alike.
    frozen: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    config = MuonConfig(**frozen)
    _check(config)
    return _build(config)


def with_presets(optimizer: Muon, names: Iterable[str]) -> Muon:
    """The same optimizer, knowing which arguments its user did not choose: it does not warn about those."""
    return _build(replace(optimizer.config, presets=frozenset(names)))


def _build(config: MuonConfig) -> Muon:
    memo: dict = {}

    def init(params: Any) -> Any:
        return _init(config, memo, params)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        return _update(config, memo, updates, state, params, extra_args)

    return Muon(init, update, config)


def _check(config: MuonConfig) -> None:
    """Raises on a bad argument, naming it."""
    check_arguments(
        config.momentum,
        config.nesterov,
        config.orthogonalizer,
        config.mu_dtype,
        config.mesh_axes,
        config.wire_dtype,
        config.manual_batch_axes,
    )
    for name in ("learning_rate", "weight_decay", "adamw_eps"):
        check_not_negative(name, getattr(config, name))
    for name in ("adamw_learning_rate", "adamw_weight_decay"):
        if getattr(config, name) is not None:
            check_not_negative(name, getattr(config, name))
    for name in ("adamw_b1", "adamw_b2"):
        check_unit_interval(name, getattr(config, name))
    if config.shape_factor is not None and not hasattr(config.shape_factor, "factor"):
        raise TypeError(
            f"shape_factor must be a value of optax_muon.shape_factors, or None, got {config.shape_factor!r}."
        )
    if isinstance(config.weight_decay_mask, str):
        check_choice("weight_decay_mask", config.weight_decay_mask, ("no_norms_or_biases", None))
    rules = (config.rules,) if isinstance(config.rules, str) else config.rules or ()
    for rule in rules:
        check_instance("rules", rule, Rule, "a sequence of optax_muon.Rule")
