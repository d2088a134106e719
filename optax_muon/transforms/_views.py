"""Which matrix view each leaf of an update has: asked of the rules, or taken from decisions made before."""

from collections.abc import Callable, Sequence
from typing import Any

from optax_muon.parameters import Decision, MatrixView, Rule, decide, leaf_paths

# A tree in, the (path, view) of each of its leaves out.
ViewsOf = Callable[[Any], list[tuple[str, MatrixView]]]


def views_from_rules(transformation: str, rules: Sequence[Rule] | None) -> ViewsOf:
    """Views decided anew for each tree; every leaf must be a matrix."""

    def views_of(tree: Any) -> list[tuple[str, MatrixView]]:
        decisions = decide(tree, rules)
        strangers = [d for d in decisions if d.view is None]
        if strangers:
            listed = ", ".join(f"`{d.path}` {d.shape} ({d.because})" for d in strangers)
            raise ValueError(
                f"{transformation} takes matrices only, but these leaves have no matrix view: {listed}. Use "
                f"optax_muon.muon, which trains them with AdamW, or select the matrices with "
                f"optax.multi_transform and optax_muon.param_labels, or give a view with "
                f"rules=[Rule(pattern, MatrixView(...))]."
            )
        return [(d.path, d.view) for d in decisions if d.view is not None]

    return views_of


def views_from_decisions(decisions: Sequence[Decision]) -> ViewsOf:
    """Views already decided on the whole tree, looked up by path: an update may hold only some leaves."""
    table = {d.path: d.view for d in decisions if d.view is not None}

    def views_of(tree: Any) -> list[tuple[str, MatrixView]]:
        return [(path, table[path]) for path in leaf_paths(tree)]

    return views_of
