"""What every leaf gets and why, as a table."""

import dataclasses
import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from optax_muon._recorded import Measurements, find_record, latest
from optax_muon.parameters import MUON, Decision, MatrixShape, Rule, decide


@dataclasses.dataclass(frozen=True)
class DescriptionRow:
    """One leaf: its decision, and with an optimizer the numbers that act on it.

    Attributes:
        path, shape, dtype, label, view, role, rule, because, flagged: as in the decision.
        matrices: the matrices of a leaf with a view, one entry per shape.
        learning_rate: number or schedule, or None without an optimizer.
        factors: shape factor of each entry of `matrices`.
        methods: orthogonalisation method of each entry of `matrices`.
        measured: {measurement: value} of the last update that `diagnostics.record` measured, if a state with
            one was given.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    label: str
    view: Any
    role: str
    rule: str
    because: str
    flagged: bool
    matrices: tuple[MatrixShape, ...]
    learning_rate: Any = None
    factors: tuple[float, ...] = ()
    methods: tuple[str, ...] = ()
    measured: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Description:
    """What `describe` returns: `str()` is a table, notebooks show it as HTML.

    Attributes:
        rows: the data, a `DescriptionRow` for each leaf in the order of `jax.tree.leaves(params)`.
        shares: share of all elements per label.
    """

    rows: tuple[DescriptionRow, ...]

    @property
    def shares(self) -> dict[str, float]:
        """Share of all elements per label."""
        total = sum(row.size for row in self.rows)
        labels = sorted({row.label for row in self.rows}, key=lambda label: (label != MUON, label))
        of = lambda label: sum(row.size for row in self.rows if row.label == label)
        return {label: of(label) / max(total, 1) for label in labels}

    def __str__(self) -> str:
        header, *body = _cells(self.rows)
        widths = [max(len(line[i]) for line in (header, *body)) for i in range(len(header))]
        lines = [
            "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip()
            for line in (header, *body)
        ]
        lines.insert(1, "-" * max(map(len, lines)))
        return "\n".join([*lines, "", *self._summary()])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        header, *body = _cells(self.rows)
        head = "".join(f"<th>{html.escape(c)}</th>" for c in header)
        rows = "".join(f"<tr>{''.join(f'<td>{html.escape(c)}</td>' for c in line)}</tr>" for line in body)
        summary = "<br>".join(html.escape(line) for line in self._summary())
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table><p>{summary}</p>"

    def _summary(self) -> list[str]:
        out = []
        for label, share in self.shares.items():
            rows = [row for row in self.rows if row.label == label]
            leaves = "1 leaf" if len(rows) == 1 else f"{len(rows)} leaves"
            out.append(f"{label}: {leaves}, {sum(r.size for r in rows):,} elements ({share:.1%})")
        if any(row.flagged for row in self.rows):
            out.append("? marks a guess: add a Rule, or the axis names of the model, to be sure")
        return out or ["no leaves"]


def describe(
    params: Any,
    optimizer: Any = None,
    rules: Rule | Sequence[Rule] | None = None,
    *,
    state: Any = None,
) -> Description:
    """Every leaf with its optimizer, its matrices and the rule that decided.

    Args:
        params: any pytree of arrays or `ShapeDtypeStruct`s; nothing is computed.
        optimizer: what `muon` or a recipe returned, or `diagnostics.record` around it, for its rules, labels,
            learning rates, shape factors and methods.
        rules: rules to try out, before those of the optimizer.
        state: a state with `diagnostics.record` in it, for what it measured last: root mean square and
            spectral norm of update and weight, polar error, cosine.

    Returns:
        A `Description`.

    Raises:
        TypeError: the optimizer has no `config` (a chain around it hides it).
        ValueError: the state holds no measurements, or those of other parameters.
        ValueError, TypeError: as `muon(...).init` would.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
        >>> print(describe({"embed": {"embedding": shape(96, 8)}, "up": {"kernel": shape(8, 32)}}))
        leaf             shape    label  matrices  because
        ----------------------------------------------------------------------------------------
        embed/embedding  (96, 8)  adamw            embedding: embedding tables look rows up
        up/kernel        (8, 32)  muon   8 x 32    mlp: feed-forward and gate matrices (in, out)
        <BLANKLINE>
        muon: 1 leaf, 256 elements (25.0%)
        adamw: 1 leaf, 768 elements (75.0%)
    """
    config = getattr(optimizer, "config", None)
    if optimizer is not None and config is None:
        raise TypeError(
            f"describe: optimizer={optimizer!r} has no config; pass what muon(...) returned, "
            "not a chain around it."
        )
    rules = () if rules is None else (rules,) if isinstance(rules, Rule) else tuple(rules)
    if config is not None:
        own = config.rules or ()
        rules += (own,) if isinstance(own, Rule) else tuple(own)
    decisions = decide(params, rules, None if config is None else config.param_labels)
    measured = _measured(state, params)
    return Description(tuple(_row(d, config, measured.get(d.path, {})) for d in decisions))


def _measured(state: Any, params: Any) -> dict[str, dict[str, float]]:
    """{path: {measurement: value}}; empty before the first update."""
    if state is None or int(find_record("describe", state).count) == 0:
        return {}
    table: dict[str, dict[str, float]] = {}
    for name, column in latest(state, params).items():
        for path, value in column.items():
            table.setdefault(path, {})[name] = value
    return table


def _row(decision: Decision, config: Any, measured: Mapping[str, float]) -> DescriptionRow:
    matrices = () if decision.view is None else decision.view.matrix_shapes(decision.shape)
    fields: dict[str, Any] = {f.name: getattr(decision, f.name) for f in dataclasses.fields(decision)}
    row = DescriptionRow(**fields, matrices=matrices, measured=measured)
    if config is None or decision.label in (getattr(config, "transforms", None) or {}):
        return row
    if decision.label == MUON:
        factor, method = config.shape_factor, config.orthogonalizer.chosen_method
        return dataclasses.replace(
            row,
            learning_rate=config.learning_rate,
            factors=tuple(1.0 if factor is None else factor.factor(m.fan_in, m.fan_out) for m in matrices),
            methods=tuple(method(m.fan_in, m.fan_out) for m in matrices),
        )
    if decision.label == "adamw":
        rate = config.adamw_learning_rate
        return dataclasses.replace(row, learning_rate=config.learning_rate if rate is None else rate)
    return row


def _cells(rows: Sequence[DescriptionRow]) -> list[tuple[str, ...]]:
    rated = any(row.learning_rate is not None for row in rows)
    shown = Measurements._fields if any(row.measured for row in rows) else ()
    columns = (
        "leaf",
        "shape",
        "label",
        "matrices",
        *(("rate", "factor", "method") if rated else ()),
        *(name.replace("_", " ") for name in shown),
        "because",
    )
    out: list[tuple[str, ...]] = [columns]
    for row in rows:
        numbers = (
            _rate(row.learning_rate),
            ", ".join(f"{f:.4g}" for f in row.factors),
            ", ".join(dict.fromkeys(row.methods)),
        )
        mark = "? " if row.flagged else ""
        matrices = ", ".join(map(_matrix, row.matrices))
        because = f"{mark}{row.rule}: {row.because}"
        # Plus zero: the cosine of a leaf that did not move is -0.
        values = (f"{row.measured[name] + 0.0:.3g}" if name in row.measured else "" for name in shown)
        cells = (row.path, str(row.shape), row.label, matrices, *(numbers if rated else ()), *values)
        out.append((*cells, because))
    return out


def _matrix(m: MatrixShape) -> str:
    return f"{m.fan_in} x {m.fan_out}" if m.count == 1 else f"{m.count} of {m.fan_in} x {m.fan_out}"


def _rate(rate: Any) -> str:
    if rate is None:
        return ""
    if callable(rate):
        return "schedule"
    try:
        return f"{float(rate):.4g}"
    except Exception:  # a tracer, under jit or inject_hyperparams
        return "traced"
