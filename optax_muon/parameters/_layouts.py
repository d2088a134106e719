"""Which matrix a hidden leaf is, from the layouts its name allows and the leaves beside it."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

from optax_muon.parameters._linen import CONV
from optax_muon.parameters._matrix_view import MatrixView
from optax_muon.parameters._names import Names, Row, fullmatch, plain
from optax_muon.parameters._paths import Leaf

# Layouts of a kernel whose name says nothing; a sibling bias tells which of them it is.
GENERAL = (
    "in out",
    "in out out",
    "in in out",
    "in out out out",
    "in in out out",
    "in in in out",
    "in in in in out",
)


@dataclasses.dataclass(frozen=True)
class Fit:
    """A layout laid over a shape: the axes of its tokens and the axes that stack layers."""

    layout: str
    layers: tuple[int, ...]
    axes: tuple[int, ...]

    @property
    def tokens(self) -> tuple[str, ...]:
        return tuple(self.layout.split())

    def side(self, token: str) -> tuple[int, ...]:
        return tuple(axis for axis, t in zip(self.axes, self.tokens, strict=True) if t == token)

    @property
    def view(self) -> MatrixView:
        return MatrixView(self.side("in"), self.side("out"))

    def sizes(self, shape: Sequence[int], token: str) -> tuple[int, ...]:
        return tuple(shape[axis] for axis in self.side(token))

    def bias_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the bias that such a kernel has, its layer axes where a scan puts them."""
        kept = [axis for axis, t in zip(self.axes, self.tokens, strict=True) if t != "in"]
        sizes = [shape[axis] for axis in kept]
        for layer in self.layers:
            sizes.insert(min(layer, len(sizes)), shape[layer])
        return tuple(sizes)


def fits(shape: Sequence[int], layouts: Iterable[str], batch: frozenset[int] | None = None) -> list[Fit]:
    """Every way to lay the layouts over a shape, in order of preference."""
    out, ndim = [], len(shape)
    for layout in layouts:
        rank = len(layout.split())
        extra = ndim - rank
        if extra < 0:
            continue
        options = [()] if extra == 0 else [(0,), (1,)] if extra == 1 else [tuple(range(extra))]
        if batch is not None:
            # Metadata named the batch axes; those that the layout does not stack itself are layer axes.
            options = _named_options(layout, ndim, batch)
        for layers in options:
            axes = tuple(axis for axis in range(ndim) if axis not in layers)
            # A number among the tokens is a stack of exactly that many matrices.
            tokens = zip(axes, layout.split(), strict=True)
            if all(not t.isdigit() or shape[axis] == int(t) for axis, t in tokens):
                out.append(Fit(layout, layers, axes))
    return out


def _named_options(layout: str, ndim: int, batch: frozenset[int]) -> list[tuple[int, ...]]:
    tokens = ["stack" if t not in ("in", "out") else t for t in layout.split()]
    stacks = tokens.count("stack")
    if len(batch) - stacks != ndim - len(tokens):
        return []
    ordered = sorted(batch)
    for skipped in range(len(ordered) + 1 - stacks) if stacks else [0]:
        layers = tuple(a for i, a in enumerate(ordered) if not skipped <= i < skipped + stacks)
        axes = [axis for axis in range(ndim) if axis not in layers]
        if all((axis in batch) == (t == "stack") for axis, t in zip(axes, tokens, strict=True)):
            return [layers]
    return []


class Neighbours:
    """The leaves of one tree, found by directory: what stands beside a leaf says how its axes are meant."""

    def __init__(self, leaves: Sequence[Leaf], names: Sequence[Names], rows: Sequence[Row | None]) -> None:
        self._leaves, self._names, self._rows = leaves, names, rows
        self._by_path = {name.raw: i for i, name in enumerate(names)}

    def leaf(self, *components: str) -> Leaf | None:
        position = self._by_path.get(tuple(components))
        return None if position is None else self._leaves[position]

    @cached_property
    def _children(self) -> dict[tuple[str, ...], tuple[str, ...]]:
        found: dict[tuple[str, ...], dict[str, None]] = {}
        for name in self._names:
            for depth, component in enumerate(name.raw):
                found.setdefault(name.raw[:depth], {})[component] = None
        return {directory: tuple(children) for directory, children in found.items()}

    def children(self, directory: tuple[str, ...]) -> tuple[str, ...]:
        return self._children.get(directory, ())

    def siblings(self, name: Names) -> tuple[str, ...]:
        """The other names beside the subject: of modules for a kernel, of leaves for a raw array."""
        depth = len(name.raw) - (2 if name.is_weight and len(name.raw) > 1 else 1)
        return tuple(c for c in self.children(name.raw[:depth]) if c != name.raw[depth])

    def partners(self, name: Names) -> list[tuple[str, Leaf]]:
        """The matrices beside a leaf: (component, leaf) of sibling leaves, or of sibling modules."""
        module, leaf = name.raw[:-1], name.raw[-1]
        if name.is_weight and module:
            directory = module[:-1]
            near = ((c, self.leaf(*directory, c, leaf)) for c in self.children(directory) if c != module[-1])
        else:
            near = ((c, self.leaf(*module, c)) for c in self.children(module) if c != leaf)
        return [(component, found) for component, found in near if found is not None]

    def bias(self, name: Names) -> Leaf | None:
        """The bias of a kernel: `bias` or `b` beside it, `x_bias` beside a raw `x`, or `bq` beside `wq`."""
        module, leaf = name.raw[:-1], name.raw[-1]
        candidates = ["bias", "b", "biases"] if name.is_weight else []
        candidates += [f"{leaf}_bias", f"b_{leaf}"]
        if leaf[:1] in ("w", "W") and len(leaf) > 1:
            candidates.append(("b" if leaf[0] == "w" else "B") + leaf[1:])
        for candidate in candidates:
            found = self.leaf(*module, candidate)
            if found is not None:
                return found
        return None

    def stacked(self, name: Names) -> int:
        """How many axes the norms nearest to a leaf have beyond one: the layers of the scan they stand in."""
        for depth in range(len(name.raw) - 1, -1, -1):
            ranks = self._norm_ranks.get(name.raw[:depth])
            if ranks:
                return min(ranks) - 1
        return 0

    @cached_property
    def _norm_ranks(self) -> dict[tuple[str, ...], list[int]]:
        found: dict[tuple[str, ...], list[int]] = {}
        for leaf, name, row in zip(self._leaves, self._names, self._rows, strict=True):
            if row is not None and row.role == "norm" and leaf.ndim and leaf.owner is None:
                for depth in range(len(name.raw)):
                    found.setdefault(name.raw[:depth], []).append(leaf.ndim)
        return found


def find(
    leaf: Leaf,
    name: Names,
    layouts: tuple[str, ...],
    sure: bool,
    partner: tuple[str, tuple[str, ...]] | None,
    near: Neighbours,
    batch: frozenset[int] | None,
) -> tuple[Fit, ...]:
    """The layouts of a leaf narrowed by its bias, its partner, its metadata and the norms around it.

    Args:
        leaf: the leaf.
        name: its path.
        layouts: the layouts its name or module allows; () when it says nothing.
        sure: whether the name is enough from rank 3 on.
        partner: name and layouts of the matrix that maps back.
        near: the other leaves.
        batch: batch axes that metadata names, or None.

    Returns:
        What is left: one fit, or the same layout over layer axis 0 and 1. Empty when a leaf of rank 3 or more
        keeps no layout or too many.
    """
    named, told = sure and bool(layouts), batch is not None
    options = fits(leaf.shape, layouts or GENERAL, batch)
    if leaf.owner is not None:
        options, by_size = _narrow(options, lambda f: _has_features(f, leaf))
        told |= by_size
    bias = near.bias(name)
    if bias is not None:
        narrowed = [f for f in options if f.bias_shape(leaf.shape) == bias.shape]
        if not narrowed and leaf.owner is None:
            # The name misleads: an output-first kernel, or a general one under a plain name.
            rest = fits(leaf.shape, ("out in", *GENERAL), batch)
            narrowed = [f for f in rest if f.bias_shape(leaf.shape) == bias.shape]
            named &= not narrowed
        options, told = narrowed or options, told or bool(narrowed)
    if partner is not None and len(options) > 1:
        pattern, back = partner
        for component, other in near.partners(name):
            if fullmatch(pattern, plain(component)):
                others = fits(other.shape, back)
                options, _ = _narrow(
                    options, lambda f, o=other, g=others: _maps_back(f, leaf.shape, g, o.shape)
                )
    stacked = max(near.stacked(name), name.lifted)
    if stacked:
        options, by_norms = _narrow(options, lambda f: len(f.layers) == stacked)
        told |= by_norms
    elif name.in_stack and layouts != CONV and not (layouts and layouts[0].startswith("stack")):
        options, by_name = _narrow(options, lambda f: len(f.layers) == 1)
        told |= by_name and bool(layouts)
    if not options or (not named and leaf.ndim > 2 and not told):
        return ()
    return _settle(options, leaf.ndim, named)


def _settle(options: list[Fit], ndim: int, named: bool) -> tuple[Fit, ...]:
    first = options[0]
    different = {f.view.resolve((1,) * ndim) for f in options}
    if not named and len(different) > 1 and any(f.layout != first.layout for f in options):
        return ()
    kept: dict[tuple[MatrixView, frozenset[int]], Fit] = {}
    for f in options:
        if f.layout == first.layout and len(f.layers) == len(first.layers):
            kept.setdefault((f.view, frozenset(f.view.batch_axes(ndim))), f)
    return tuple(kept.values())


def _narrow(options: list[Fit], keep: Callable[[Fit], bool]) -> tuple[list[Fit], bool]:
    """The options that pass, if any do."""
    narrowed = [f for f in options if keep(f)]
    return (narrowed, True) if narrowed else (options, False)


def _has_features(f: Fit, leaf: Leaf) -> bool:
    n_in = leaf.owner and leaf.owner.fact("in_features")
    n_out = leaf.owner and leaf.owner.fact("out_features")
    if n_in is None or n_out is None:
        return True
    n_in = (n_in,) if isinstance(n_in, int) else n_in
    n_out = (n_out,) if isinstance(n_out, int) else n_out
    return (f.sizes(leaf.shape, "in"), f.sizes(leaf.shape, "out")) == (n_in, n_out)


def _maps_back(f: Fit, shape: Sequence[int], others: list[Fit], other_shape: Sequence[int]) -> bool:
    """Whether another matrix, laid out alike, maps the outputs of this one back to its inputs."""

    def fits_with(g: Fit) -> bool:
        if len(g.layers) != len(f.layers) or len(g.tokens) != len([t for t in f.tokens if not t.isdigit()]):
            return False
        if g.layers != f.layers or any(
            shape[a] != other_shape[b] for a, b in zip(f.layers, g.layers, strict=True)
        ):
            return False
        ins, outs = f.sizes(shape, "in"), f.sizes(shape, "out")
        g_ins, g_outs = g.sizes(other_shape, "in"), g.sizes(other_shape, "out")
        if len(ins) > len(outs):  # an output projection (H, K, D), beside its query (D, H, K)
            return outs == g_ins and ins == g_outs
        return ins == g_outs and (len(outs) == 1 or outs[-1:] == g_ins[-1:])

    return any(fits_with(g) for g in others)
