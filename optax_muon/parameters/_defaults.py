"""What a leaf gets when the user says nothing: by axis names, module types, path words, shape."""

import dataclasses
import math
import re
from collections.abc import Sequence

from optax_muon.parameters import _linen, _nnx
from optax_muon.parameters import _metadata as metadata
from optax_muon.parameters._blocks import contiguous_blocks
from optax_muon.parameters._layouts import Fit, Neighbours, find, fits
from optax_muon.parameters._matrix_view import MatrixView
from optax_muon.parameters._modules import ModuleSays, module_says
from optax_muon.parameters._names import Names, Row
from optax_muon.parameters._paths import Leaf
from optax_muon.parameters._stacks import Member, layer_axis

_LOW_RANK = Row("lora", "hidden", "low-rank factors a (in, r) and b (r, out)", layouts=("in out",))
_STATE_SPACE = Row("state space", "ssm", "skip gain of a state-space layer")
_TOKEN_AXIS = Row("axis names", "embedding", "one axis is the vocabulary")
_VECTORS = Row("shape", "scalar", "scalars and vectors")
_STACKED_VECTORS = Row("shape", "scalar", "vectors, one per layer of the scan around them")
_MATRIX = Row("shape", "hidden", "no rule; a matrix (in, out)", layouts=("in out",))
_WINDOW = Row("shape", "hidden", "no rule; square windows make it a convolution", layouts=_linen.CONV)
# No published depthwise convolution over one axis has as many taps; `conv_out/kernel` may well be a Dense.
_WIDEST_WINDOW = 16
_UNKNOWN = Row("none", "unknown", "matches no rule")


@dataclasses.dataclass(frozen=True)
class Draft:
    """The default for one leaf. `view` is the matrix it has, Muon or not; role 'unknown' asks."""

    label: str
    view: MatrixView | None
    role: str
    rule: str
    because: str
    flagged: bool = False


@dataclasses.dataclass(frozen=True)
class _Open:
    """A leaf between the passes: its row, and the layouts left when it is hidden."""

    row: Row
    options: tuple[Fit, ...] = ()
    groups: int = 1
    flagged: bool = False


def drafts(leaves: Sequence[Leaf]) -> tuple[Draft, ...]:
    """The default of every leaf of one tree."""
    # Dots too: trees with the flat names of a torch state dict.
    names = [Names(tuple(re.split(r"[/.]", leaf.path)) if leaf.path else ()) for leaf in leaves]
    roles = [_role_row(leaf, name) for leaf, name in zip(leaves, names, strict=True)]
    near = Neighbours(leaves, names, roles)
    table = list(zip(leaves, names, roles, strict=True))
    opened = [_open(leaf, name, role, near) for leaf, name, role in table]
    members = [_member(leaf, name, o) for (leaf, name, _), o in zip(table, opened, strict=True)]
    return tuple(_close(i, table[i][0], opened[i], members) for i in range(len(leaves)))


def _role_row(leaf: Leaf, name: Names) -> Row | None:
    return next((row for row in _linen.ROLES if row.matches(name, leaf.ndim, ())), None)


def _open(leaf: Leaf, name: Names, role: Row | None, near: Neighbours) -> _Open:
    says = module_says(leaf)
    if leaf.ndim < 2:
        named = says.role if says and says.role != "hidden" else None
        if named:
            return _Open(Row(says.cls, named, f"{named} of {says.cls}"))  # pyright: ignore[reportOptionalMemberAccess]
        return _Open(role if role and role.role != "head" else _VECTORS)
    if metadata.has_vocabulary(leaf) and not (says and says.role == "head"):
        is_head = leaf.names is not None and leaf.names[-1] in metadata.VOCAB
        return _Open(dataclasses.replace(_TOKEN_AXIS, role="head") if is_head else _TOKEN_AXIS)
    if says is not None:
        return _open_module(leaf, name, role, says, near)
    lora = _low_rank(name, leaf, near)
    if role is not None and not lora:
        return _Open(role)
    batch = metadata.batch_axes(leaf)
    if batch is not None and leaf.ndim - len(batch) < 2:
        return _Open(dataclasses.replace(_VECTORS, rule="axis names"))
    if (
        name.raw
        and name.raw[-1] == "D"
        and any(c.lower() in ("a_log", "dt_bias") for c in near.siblings(name))
    ):
        return _Open(_STATE_SPACE)
    row = _LOW_RANK if lora else _hidden_row(leaf, name, near)
    named_layout = metadata.layout(leaf)
    if named_layout is not None:
        because = row.because if row else "heads and widths by axis names"
        row = Row("axis names", "hidden", because, layouts=(named_layout,))
    if row is not None and row.role != "hidden":
        return _Open(row)
    return _open_hidden(leaf, name, row, near, batch)


def _hidden_row(leaf: Leaf, name: Names, near: Neighbours) -> Row | None:
    siblings = near.siblings(name)
    return next((row for row in _nnx.EINSUMS + _linen.HIDDEN if row.matches(name, leaf.ndim, siblings)), None)


def _open_module(leaf: Leaf, name: Names, role: Row | None, says: ModuleSays, near: Neighbours) -> _Open:
    """A leaf of a framework's own module: the class gives the axes, the path tells heads and patches."""
    if says.role == "hidden":
        if role is not None and role.rule in ("head", "patch embedding"):
            return _Open(role)
        row = _hidden_row(leaf, name, near)
        if row is not None and row.role == "head":
            return _Open(row)
    because = {"hidden": f"{says.cls} is ({', '.join(says.layout.split())})"}.get(
        says.role, f"{says.role} of {says.cls}"
    )
    row = Row(says.cls, says.role, because, layouts=(says.layout,) if says.layout else ())
    if says.role != "hidden":
        return _Open(row)
    # A layout of as many axes as the leaf has leaves nothing for metadata to tell.
    batch = None if len(says.layout.split()) == leaf.ndim else metadata.batch_axes(leaf)
    options = find(leaf, name, row.layouts, True, None, near, batch)
    return _Open(row, options, says.groups)


def _open_hidden(
    leaf: Leaf, name: Names, row: Row | None, near: Neighbours, batch: frozenset[int] | None
) -> _Open:
    stacked = max(near.stacked(name), name.lifted)
    if row is None and sum(n != 1 for n in leaf.shape) < 2:
        return _Open(_VECTORS)
    if row is None:
        if batch is not None and leaf.ndim - len(batch) == 2:
            named = Row(
                "axis names", "hidden", "a matrix (in, out) without its batch axes", layouts=("in out",)
            )
            return _Open(named, find(leaf, name, ("in out",), True, None, near, batch))
        if leaf.ndim - stacked < 2:
            return _Open(_STACKED_VECTORS)
        if leaf.ndim == 2 or (stacked and leaf.ndim - stacked == 2):
            return _Open(_MATRIX, find(leaf, name, ("in out",), True, None, near, batch), flagged=True)
        return _Open(_UNKNOWN)
    if row.rule == "convolution" and leaf.ndim == 2 and min(leaf.shape) > _WIDEST_WINDOW:
        return _Open(_MATRIX, find(leaf, name, ("in out",), True, None, near, batch), flagged=True)
    if row.rule == "convolution" and leaf.ndim - stacked < 3:
        return _Open(Row("depthwise", "depthwise", "a convolution without channel axes"))
    options = find(leaf, name, row.layouts, row.sure, row.partner, near, batch)
    if not options:
        window = leaf.shape[0] == leaf.shape[1] <= 16 and leaf.ndim == 4
        if not (window and not stacked and name.leaf == "kernel"):
            return _Open(_UNKNOWN)
        row, options = _WINDOW, tuple(fits(leaf.shape, ("in in in out",)))
    windows = row.rule in ("convolution", "kernel", "shape")
    if windows and len(options[0].side("in")) > 1 and all(leaf.shape[f.side("in")[-1]] == 1 for f in options):
        return _Open(Row("depthwise", "depthwise", "one input channel per filter: no channels are mixed"))
    return _Open(row, options, flagged=row is _WINDOW or row.leaf == r"weights?")


def _low_rank(name: Names, leaf: Leaf, near: Neighbours) -> bool:
    """Whether a raw `a` or `b` is half of a pair (in, r), (r, out)."""
    if not name.raw or name.raw[-1] not in ("a", "b", "A", "B") or leaf.ndim < 2:
        return False
    first, second = ("a", "b") if name.raw[-1].islower() else ("A", "B")
    a, b = near.leaf(*name.raw[:-1], first), near.leaf(*name.raw[:-1], second)
    return a is not None and b is not None and a.ndim == b.ndim >= 2 and a.shape[-1] == b.shape[-2]


def _member(leaf: Leaf, name: Names, opened: _Open) -> Member:
    layers: tuple[int, ...] | None = None
    fans: tuple[tuple[int, int], ...] = ()
    if opened.row.role == "norm" and leaf.owner is None:
        layers = {1: (), 2: (0, 1)}.get(leaf.ndim)
    elif opened.options:
        lengths = {len(f.layers) for f in opened.options}
        if lengths == {0}:
            # A stack of experts may be a scan of its own inside an unstacked block.
            layers = () if "stack" not in opened.options[0].tokens else None
        elif lengths == {1} and "stack" not in opened.options[0].tokens:
            layers = tuple(f.layers[0] for f in opened.options)
            sides = [(f.sizes(leaf.shape, "in"), f.sizes(leaf.shape, "out")) for f in opened.options]
            fans = tuple((math.prod(n_in), math.prod(n_out)) for n_in, n_out in sides)
    return Member(name.raw, leaf.shape, layers, fans)


def _close(position: int, leaf: Leaf, opened: _Open, members: Sequence[Member]) -> Draft:
    row = opened.row
    if row.role == "unknown" and 0 in leaf.shape:
        return Draft("adamw", None, "vector", "shape", "nothing in it")
    if row.role != "hidden":
        view = _spare_view(leaf, row.role)
        return Draft("adamw", view, row.role, row.rule, row.because)
    if not opened.options:
        return Draft("adamw", None, "unknown", _UNKNOWN.rule, _UNKNOWN.because)
    fit, because, flagged = opened.options[0], row.because, opened.flagged
    if len(opened.options) > 1:
        axis, why = layer_axis(members[position], members)
        fit = next(f for f in opened.options if f.layers == (axis,))
        because = f"{because}; layer axis {axis} ({why})"
        flagged = flagged or why.startswith("guessed")
    view = fit.view
    if opened.groups > 1:
        (out,) = fit.side("out")
        view = dataclasses.replace(
            view, blocks=contiguous_blocks(out, max(leaf.shape[out] // opened.groups, 1))
        )
        because = f"{because}, each of {opened.groups} groups alone"
    view = view.resolve(leaf.shape, leaf.path)
    if min(min(s.fan_in, s.fan_out) for s in view.matrix_shapes(leaf.shape)) < 2:
        return Draft("adamw", view, "vector", "shape", "a side of 1 makes it a vector")
    return Draft("muon", view, "hidden", row.rule, because, flagged)


def _spare_view(leaf: Leaf, role: str) -> MatrixView | None:
    """The matrix of an embedding or a head, for users who insist."""
    if role not in ("embedding", "head") or leaf.ndim < 2 or 0 in leaf.shape:
        return None
    last = leaf.path.rsplit("/", 1)[-1]
    if leaf.ndim == 2:
        view = MatrixView(1, 0) if last == "weight" else MatrixView(0, 1)
    elif last == "kernel":
        view = MatrixView(tuple(range(leaf.ndim - 1)), leaf.ndim - 1)
    else:
        return None
    return view.resolve(leaf.shape, leaf.path)
