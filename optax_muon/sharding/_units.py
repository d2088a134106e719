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
        shape: its axes.
        cut: for each of them the mesh axes that cut it, major to minor.
        view: which of them are rows and columns; without blocks the rows are the short side, because a matrix is
            orthogonalised lying anyway.
    """

    shape: tuple[int, ...]
    cut: tuple[Axes, ...]
    view: MatrixView

    def local_shape(self, sizes: dict[str, int]) -> tuple[int, ...]:
        """The shape of one device's piece."""
        return tuple(n // size_of(axes, sizes) for n, axes in zip(self.shape, self.cut, strict=True))


def unit_axes(leaf: LeafSpec) -> tuple[int, ...]:
    """The leaf's axes that are not batch axes."""
    batch = leaf.view.batch_axes(len(leaf.shape))
    return tuple(axis for axis in range(len(leaf.shape)) if axis not in batch)


def is_cut(leaf: LeafSpec) -> bool:
    """Whether the mesh cuts the leaf's matrices."""
    return any(leaf.spec[axis] for axis in unit_axes(leaf))


def units_of(leaf: LeafSpec, sizes: dict[str, int]) -> list[tuple[Kind, int]]:
    """(kind, number of units on one device) for every stack into which a leaf is taken apart.

    A leaf whose matrices are whole on every device is taken apart into matrices at once, so that blocks join the
    matrices of their shape; otherwise its batch entries travel whole and are taken apart by their owner.
    """
    batch, axes = leaf.view.batch_axes(len(leaf.shape)), unit_axes(leaf)
    local = tuple(
        n // size_of(leaf.spec[axis], sizes) if axis in batch else n for axis, n in enumerate(leaf.shape)
    )
    if not is_cut(leaf):
        shapes = leaf.view.matrix_shapes(local)
        sides = [((s.fan_in, s.fan_out), s.count) for s in shapes]
        plain = MatrixView((0,), (1,))
        return [(Kind(both, ((), ()), _lying(plain, both)), count) for both, count in sides]
    shape, cut = tuple(leaf.shape[axis] for axis in axes), tuple(leaf.spec[axis] for axis in axes)
    view = leaf.view.unbatched(len(leaf.shape))
    return [
        (Kind(shape, cut, view if view.blocks else _lying(view, shape)), math.prod(local[a] for a in batch))
    ]


def turned(kind: Kind) -> tuple[Kind, tuple[int, ...]] | None:
    """The same unit with the axes of its other side first, and the transposition; None for blocks.

    A tall matrix turned may travel in one exchange with wide ones.
    """
    if kind.view.blocks:
        return None
    rows, columns = as_axes(kind.view.reduction_axes), as_axes(kind.view.output_axes)
    order = columns + rows if rows + columns == tuple(range(len(kind.shape))) else rows + columns
    view = MatrixView(tuple(order.index(axis) for axis in rows), tuple(order.index(axis) for axis in columns))
    return Kind(tuple(kind.shape[a] for a in order), tuple(kind.cut[a] for a in order), view), order


def as_axes(axes: int | Sequence[int]) -> tuple[int, ...]:
    """Axes as a tuple."""
    return (axes,) if isinstance(axes, int) else tuple(axes)


def _lying(view: MatrixView, shape: Sequence[int]) -> MatrixView:
    return MatrixView(*short_and_long(view, shape))


def short_and_long(view: MatrixView, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Row and column axes, those of the short side first; where both are equal, the side with fewer axes first."""
    sides = [as_axes(view.reduction_axes), as_axes(view.output_axes)]
    short, long = sorted(sides, key=lambda side: (math.prod(shape[axis] for axis in side), len(side)))
    return short, long


def matrices_of(kind: Kind) -> tuple[tuple[int, int, int], ...]:
    shapes = kind.view.matrix_shapes(kind.shape)
    return tuple((s.count, min(s.fan_in, s.fan_out), max(s.fan_in, s.fan_out)) for s in shapes)


def size_of(axes: Sequence[str], sizes: dict[str, int]) -> int:
    return math.prod(sizes[name] for name in axes)
