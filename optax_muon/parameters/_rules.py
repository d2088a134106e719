"""Which optimizer and which matrix each leaf gets, decided once per tree from paths, shapes and metadata."""

import dataclasses
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from optax_muon.parameters._defaults import Draft, drafts
from optax_muon.parameters._matrix_view import MatrixView
from optax_muon.parameters._paths import (
    Leaf,
    entries_by_path,
    has_holes,
    leaves_of,
    shared_leaves,
    warn_once,
)

MUON, ADAMW, FROZEN = "muon", "adamw", "frozen"


@dataclasses.dataclass(frozen=True)
class Rule:
    r"""What the leaves get whose whole slash path matches a pattern. The first rule that matches decides.

    Args:
        pattern: a regular expression for the whole path, `re.fullmatch`.
        assignment: a `MatrixView` (Muon on these matrices), None (AdamW), or a label: 'muon' (with the view
            that the tables know), 'adamw', 'frozen', or one of your own for `transforms=`.
        because: a reason for `describe`.

    Raises:
        ValueError: the pattern is no regular expression, or the label is empty.
        TypeError: the pattern is no string, or the assignment none of the three.

    Example:
        >>> experts = Rule(r".*/experts/w_up", MatrixView(-2, -1), because="(E, in, out)")
        >>> b_only = Rule(r".*/lora_a(/kernel)?", None, because="Muon on LoRA's B, AdamW on its A")
    """

    pattern: str
    assignment: MatrixView | str | None
    because: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str):
            raise TypeError(
                f"Rule: pattern={self.pattern!r}; give a regular expression for the whole slash path."
            )
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(
                f"Rule: pattern={self.pattern!r} is no regular expression ({error}). "
                f"For a literal path write re.escape({self.pattern!r})."
            ) from error
        if not isinstance(self.assignment, MatrixView | str | None):
            raise TypeError(
                f"Rule({self.pattern!r}): assignment={self.assignment!r}; "
                "give a MatrixView, None (AdamW) or a label."
            )
        if self.assignment == "":
            raise ValueError(f"Rule({self.pattern!r}): the label is empty; for AdamW give None.")


@dataclasses.dataclass(frozen=True)
class Decision:
    """What one leaf gets, and why.

    Attributes:
        path: slash path.
        shape: shape of the leaf.
        dtype: name of its dtype.
        label: 'muon', 'adamw', 'frozen' or a label of the user's.
        view: the matrices (resolved), for 'muon' and for the user's labels where they are known; else None.
        role: 'hidden', 'embedding', 'head', 'norm', 'bias', 'scalar', 'depthwise', 'ssm', 'vector', 'static',
            'other'.
        rule: the rule that decided.
        because: its reason.
        flagged: whether it is a guess worth a look.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    label: str
    view: MatrixView | None
    role: str
    rule: str
    because: str
    flagged: bool = False


def decays(decision: Decision) -> bool:
    """Whether weight decay reaches a leaf by default: matrices and embeddings, not norms, biases, scalars."""
    return decision.role not in ("norm", "bias", "scalar", "ssm", "static") and decision.label != FROZEN


def decide(
    params: Any,
    rules: Rule | Sequence[Rule] | None = None,
    param_labels: Any = None,
) -> tuple[Decision, ...]:
    """Label and matrix view of every leaf.

    First match wins: `param_labels`, then `rules`, axis names, module types, tables of path words, shape.

    Args:
        params: any pytree of arrays, `ShapeDtypeStruct`s or tracers.
        rules: a Rule or several.
        param_labels: labels in a tree or prefix with the paths of `params` (any container), or a function of
            `params` that returns one. At a leaf, 'muon' insists on Muon; above leaves it reaches those that
            are hidden matrices, embeddings or heads and leaves the others their label. None leaves the
            choice.

    Returns:
        One decision per leaf, in the order of `jax.tree.leaves(params)`.

    Raises:
        ValueError: leaves of rank 3 or more that nothing matches, complex leaves, views that do not fit,
            'muon' for a leaf without a matrix, a leaf without a label, two leaves with one path.
        TypeError: a leaf that is no array, a label that is no string, rules that are no Rules.

    Example:
        >>> params = {"dense": {"kernel": jnp.zeros((4, 8)), "bias": jnp.zeros(8)}}
        >>> [(d.path, d.label) for d in decide(params)]
        [('dense/bias', 'adamw'), ('dense/kernel', 'muon')]
    """
    rules = as_rules(rules)
    leaves = leaves_of(params)
    if not leaves:
        return ()
    given = _given_labels(params, param_labels)
    decisions = _decide(leaves, rules, given)
    if not has_holes(params):
        _warn(leaves, decisions, rules, params)
    return decisions


def decide_leaves(leaves: tuple[Leaf, ...]) -> tuple[Decision | None, ...]:
    """The default decision of each leaf record; None where nothing says which matrix it is."""
    return tuple(
        _one(leaf, draft, None, None, False) for leaf, draft in zip(leaves, _drafts(leaves), strict=True)
    )


def as_rules(rules: Rule | Sequence[Rule] | None) -> tuple[Rule, ...]:
    """One rule, several or none, as a tuple."""
    rules = () if rules is None else (rules,) if isinstance(rules, Rule) else tuple(rules)
    for rule in rules:
        if not isinstance(rule, Rule):
            raise TypeError(
                f"rules: got {rule!r}; write Rule(pattern, view), or Rule(pattern, None) for AdamW."
            )
    return rules


def param_labels(params: Any, rules: Rule | Sequence[Rule] | None = None) -> Any:
    """The label of every leaf: the label function for `optax.multi_transform`.

    Args:
        params: any pytree of arrays.
        rules: a Rule or several, before the tables.

    Returns:
        A tree with the structure of `params`: 'muon', 'adamw', 'frozen' (leaves that are not floating), or a
        label that a rule gives.

    Raises:
        ValueError, TypeError: as `decide`.

    Example:
        >>> param_labels({"embed": {"embedding": jnp.zeros((9, 4))}, "up": {"kernel": jnp.zeros((4, 8))}})
        {'embed': {'embedding': 'adamw'}, 'up': {'kernel': 'muon'}}

    Note:
        `optax.multi_transform` calls its label function on the gradients at every update. Where those lack
        what the params have (boxes, axis names, module types, another dtype), the labels can differ between
        the two and the state no longer fits. `muon` guards against that; a bare `optax.multi_transform` does
        not, so pass it labels computed once: `optax.multi_transform(transforms, param_labels(params))`.
    """
    return jax.tree.unflatten(jax.tree.structure(params), [d.label for d in decide(params, rules)])


def matrix_views(params: Any, rules: Rule | Sequence[Rule] | None = None) -> Any:
    """The matrix view of every leaf that gets Muon, None for the others.

    Args:
        params: any pytree of arrays.
        rules: a Rule or several, before the tables.

    Returns:
        A tree with the structure of `params` whose leaves are `MatrixView` or None.

    Raises:
        ValueError, TypeError: as `decide`.

    Example:
        >>> print(matrix_views({"query": {"kernel": jnp.zeros((64, 4, 16))}})["query"]["kernel"])
        MatrixView(reduction_axes=(0,), output_axes=(1, 2))
    """
    return jax.tree.unflatten(jax.tree.structure(params), [d.view for d in decide(params, rules)])


def rules_from_names(names: Sequence[str], params: Sequence[Any]) -> tuple[Rule, ...]:
    """Rules for parameters in a plain list whose names are kept apart (Keras variables, functional models).

    Args:
        names: the slash path of each parameter.
        params: the parameters, in the same order.

    Returns:
        One rule per parameter, for a list or tuple in this order.

    Raises:
        ValueError: the lengths differ, a name stands twice, or as `decide`.

    Example:
        >>> names = ["embed/embeddings", "dense/kernel"]
        >>> params = [jnp.zeros((9, 4)), jnp.zeros((4, 4))]
        >>> param_labels(params, rules=rules_from_names(names, params))
        ['adamw', 'muon']
    """
    if len(names) != len(params) or len(set(names)) != len(names):
        raise ValueError(
            f"rules_from_names: got {len(names)} names ({len(set(names))} distinct) for {len(params)} "
            "parameters; give one name of its own for each."
        )
    by_name = {d.path: d for d in decide(dict(zip(names, params, strict=True)))}
    out = []
    for position, name in enumerate(names):
        decision = by_name["/".join(c for c in name.split("/") if c)]
        assignment = (
            decision.view if decision.label == MUON else None if decision.label == ADAMW else decision.label
        )
        out.append(Rule(str(position), assignment, f"{name}: {decision.because}"))
    return tuple(out)


@lru_cache(maxsize=64)
def _drafts(leaves: tuple[Leaf, ...]) -> tuple[Draft, ...]:
    return drafts(leaves)


@lru_cache(maxsize=64)
def _matches(paths: tuple[str, ...], rules: tuple[Rule, ...]) -> tuple[int | None, ...]:
    """The first rule for each path; patterns run once per tree, never per step."""
    compiled = [re.compile(rule.pattern) for rule in rules]
    return tuple(next((i for i, p in enumerate(compiled) if p.fullmatch(path)), None) for path in paths)


@lru_cache(maxsize=64)
def _unused(paths: tuple[str, ...], rules: tuple[Rule, ...]) -> tuple[str, ...]:
    """The patterns that match no path at all; one that always comes too late matches."""
    used = {i for i in _matches(paths, rules) if i is not None}
    idle = [re.compile(rule.pattern) for i, rule in enumerate(rules) if i not in used]
    return tuple(p.pattern for p in idle if not any(p.fullmatch(path) for path in paths))


@lru_cache(maxsize=64)
def _decide(
    leaves: tuple[Leaf, ...],
    rules: tuple[Rule, ...],
    given: tuple[tuple[str | None, bool], ...] | None,
) -> tuple[Decision, ...]:
    matched = _matches(tuple(leaf.path for leaf in leaves), rules)
    out, unmatched = [], []
    for i, (leaf, draft) in enumerate(zip(leaves, _drafts(leaves), strict=True)):
        first = matched[i]
        rule = None if first is None else rules[first]
        label, exact = (None, False) if given is None else given[i]
        decision = _one(leaf, draft, rule, label, exact)
        if decision is None:
            unmatched.append(leaf)
        else:
            out.append(decision)
    if unmatched:
        raise ValueError(
            "\n".join([*map(_unmatched, unmatched), "describe(params, rules=rules) lists every decision."])
        )
    return tuple(out)


def _one(leaf: Leaf, draft: Draft, rule: Rule | None, given: str | None, exact: bool) -> Decision | None:
    """The decision for a leaf, or None when nothing says which matrix it is."""
    base = Decision(
        leaf.path,
        leaf.shape,
        leaf.dtype,
        draft.label,
        None,
        draft.role,
        draft.rule,
        draft.because,
        draft.flagged,
    )
    view = draft.view
    if rule is not None:
        base = dataclasses.replace(
            base, rule=rule.pattern, because=rule.because or "a rule of yours", flagged=False
        )
        assignment = rule.assignment
        if isinstance(assignment, MatrixView):
            view, label = assignment.resolve(leaf.shape, leaf.path), MUON
            base = dataclasses.replace(
                base, role="hidden" if draft.role in ("other", "unknown") else draft.role
            )
        else:
            label = ADAMW if assignment is None else assignment
        base = dataclasses.replace(base, label=label)
    own = rule is not None
    if given is not None and (exact or given != MUON or _has_matrix(leaf, draft, view)):
        own = True
        base = dataclasses.replace(
            base, label=given, rule="param_labels", because="a label of yours", flagged=False
        )
    return _checked(leaf, draft, base, view, own)


def _checked(leaf: Leaf, draft: Draft, base: Decision, view: MatrixView | None, own: bool) -> Decision | None:
    kind = number_kind(leaf.dtype)
    if kind == "static" and base.label in (ADAMW, FROZEN, MUON):
        return dataclasses.replace(base, label=FROZEN, role="static", flagged=False)
    if kind == "complex" and (base.label == MUON or not own):
        raise ValueError(
            f"`{leaf.path}` has dtype {leaf.dtype}; Muon and AdamW here train real parameters. "
            "Store its real and imaginary parts, or give it a label of its own with "
            "transforms={label: transformation}, or 'frozen'."
        )
    if draft.role == "unknown" and not own:
        return None
    if base.label == MUON and view is None:
        remedy = f"no rule says which matrix it is. Add {_ready_view(leaf)} to rules=,"
        if leaf.ndim < 2:
            remedy = "it is no matrix. Give it the shape of one (parameters are not to be ravelled),"
        raise ValueError(
            f"`{leaf.path}` has shape {leaf.shape} and is labelled 'muon', but {remedy} or label it 'adamw'."
        )
    role = "other" if base.role == "unknown" else base.role
    return dataclasses.replace(base, view=None if base.label in (ADAMW, FROZEN) else view, role=role)


def _has_matrix(leaf: Leaf, draft: Draft, view: MatrixView | None) -> bool:
    """Whether a 'muon' that stands above a leaf reaches it."""
    return (
        view is not None
        and draft.role in ("hidden", "embedding", "head")
        and number_kind(leaf.dtype) == "real"
    )


def number_kind(dtype: str) -> str:
    """'real' for floating dtypes, 'complex', or 'static' for what no optimizer moves."""
    if dtype == "float0" or dtype.startswith("key<"):
        return "static"
    if jnp.issubdtype(jnp.dtype(dtype), jnp.complexfloating):
        return "complex"
    return "real" if jnp.issubdtype(jnp.dtype(dtype), jnp.floating) else "static"


def _ready_view(leaf: Leaf) -> str:
    pattern = re.sub(r"^.*/(?=[^/]+/[^/]+$)", ".*/", leaf.path)
    ndim = leaf.ndim
    view = (
        "MatrixView(reduction_axes=(0,), output_axes=(1, 2))"
        if ndim == 3
        else (
            f"MatrixView(reduction_axes=({ndim - 2},), output_axes=({ndim - 1},))"
            if ndim >= 2
            else "MatrixView(...)"
        )
    )
    return f'Rule(r"{pattern}", {view})'


def _unmatched(leaf: Leaf) -> str:
    ready = _ready_view(leaf)
    pattern = ready[len("Rule(") : ready.index('", ') + 1]
    return (
        f"`{leaf.path}` has shape {leaf.shape} and matches no rule, so its matrix is unknown.\n"
        f"Add {ready} to rules=, or Rule({pattern}, None) for AdamW."
    )


def _given_labels(params: Any, given: Any) -> tuple[tuple[str | None, bool], ...] | None:
    if given is None:
        return None
    return tuple(entries_by_path(given, params, "param_labels", lambda x: isinstance(x, str)))


def _warn(
    leaves: tuple[Leaf, ...], decisions: tuple[Decision, ...], rules: tuple[Rule, ...], params: Any
) -> None:
    for pattern in _unused(tuple(leaf.path for leaf in leaves), rules):
        paths = ", ".join(f"`{leaf.path}`" for leaf in leaves[:3])
        warn_once(f"Rule({pattern!r}) matches no leaf. Patterns match whole paths, such as {paths}.")
    pairs = zip(leaves, _drafts(leaves), strict=True)
    hidden = [leaf.path for leaf, draft in pairs if draft.label == MUON and number_kind(leaf.dtype) == "real"]
    # A label of the user's own may be Muon too.
    if hidden and all(d.label in (ADAMW, FROZEN) for d in decisions):
        warn_once(
            f"No leaf gets Muon, although `{hidden[0]}` and {len(hidden) - 1} more are hidden matrices. "
            "Loosen rules= or param_labels=, or use optax.adamw."
        )
    for a, b in shared_leaves(params):
        if decisions[a].label != decisions[b].label:
            warn_once(
                f"`{decisions[a].path}` and `{decisions[b].path}` are one array, but rules give it "
                f"'{decisions[a].label}' ({decisions[a].rule}) and '{decisions[b].label}' "
                f"({decisions[b].rule}). "
                "Keep one of the leaves, or give both one label."
            )
