"""What travels: a leaf as units, one batch entry each with all its matrix axes."""

import dataclasses
import math
from collections.abc import Sequence

from optax_muon.parameters import MatrixView

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """What the plan has to know of one leaf.

    Attributes:
        path: for messages.
        shape: global shape (over the free mesh axes).
        view: the resolved MatrixView.
        spec: for every axis of the leaf the mesh axes that cut it, major to minor; () where it is whole.
        wire_dtype: name of the dtype in which the leaf's matrices travel and are worked on.
        varying: manual axes over which the leaf varies (kept apart so that the types stay right).
    """

    path: str
    shape: tuple[int, ...]
    view: MatrixView
    spec: tuple[Axes, ...]
    wire_dtype: str
    varying: Axes = ()


@dataclasses.dataclass(frozen=True)
class Kind:
    """How one unit of travel is laid out when it is whole.

    Attributes:
        shape: its axes in the order of `unit_axes`.
        cut: for each of them the mesh axes that cut it, major to minor.
        view: which of them are rows and columns; without blocks the rows come first and are the short side.
    """

    shape: tuple[int, ...]
    cut: tuple[Axes, ...]
    view: MatrixView

    def local_shape(self, sizes: dict[str, int]) -> tuple[int, ...]:
        """The shape of one device's piece."""
        return tuple(n // size_of(axes, sizes) for n, axes in zip(self.shape, self.cut, strict=True))


def unit_axes(leaf: LeafSpec) -> tuple[int, ...]:
    """The leaf's axes that are not batch axes, in the order in which a unit has them.

    Without blocks the short side comes first, so that tall and wide matrices that are cut alike travel alike.
    """
    if leaf.view.blocks:
        batch = leaf.view.batch_axes(len(leaf.shape))
        return tuple(axis for axis in range(len(leaf.shape)) if axis not in batch)
    rows, columns = short_and_long(leaf.view, leaf.shape)
    return (*rows, *columns)


def units_of(leaf: LeafSpec, sizes: dict[str, int]) -> list[tuple[Kind, int]]:
    """(kind, number of units on one device) for every stack into which a leaf is taken apart.

    A leaf whose matrices are whole on every device is taken apart into matrices at once, so that blocks join the
    matrices of their shape; otherwise its batch entries travel whole and are taken apart by their owner.
    """
    ndim = len(leaf.shape)
    batch, axes = leaf.view.batch_axes(ndim), unit_axes(leaf)
    if not is_cut(leaf):
        local = tuple(
            n // size_of(leaf.spec[axis], sizes) if axis in batch else n for axis, n in enumerate(leaf.shape)
        )
        shapes = leaf.view.matrix_shapes(local)
        plain = MatrixView((0,), (1,))
        return [
            (Kind((min(s.fan_in, s.fan_out), max(s.fan_in, s.fan_out)), ((), ()), plain), s.count)
            for s in shapes
        ]
    view = leaf.view.unbatched(ndim)
    if not leaf.view.blocks:
        rows = len(short_and_long(leaf.view, leaf.shape)[0])
        view = MatrixView(tuple(range(rows)), tuple(range(rows, len(axes))))
    kind = Kind(tuple(leaf.shape[axis] for axis in axes), tuple(leaf.spec[axis] for axis in axes), view)
    return [(kind, math.prod(leaf.shape[axis] // size_of(leaf.spec[axis], sizes) for axis in batch))]


def is_cut(leaf: LeafSpec) -> bool:
    """Whether the mesh cuts the leaf's matrices."""
    return any(leaf.spec[axis] for axis in unit_axes(leaf))


def short_and_long(view: MatrixView, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Row and column axes, those of the short side first; where both are equal, the side with fewer axes first."""
    both = (view.reduction_axes, view.output_axes)
    sides = [(side,) if isinstance(side, int) else tuple(side) for side in both]
    short, long = sorted(sides, key=lambda side: (math.prod(shape[axis] for axis in side), len(side)))
    return short, long


def matrices_of(kind: Kind) -> tuple[tuple[int, int, int], ...]:
    shapes = kind.view.matrix_shapes(kind.shape)
    return tuple((s.count, min(s.fan_in, s.fan_out), max(s.fan_in, s.fan_out)) for s in shapes)


def size_of(axes: Sequence[str], sizes: dict[str, int]) -> int:
    return math.prod(sizes[name] for name in axes)
