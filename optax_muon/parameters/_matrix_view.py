"""Which axes of a leaf are the rows, the columns and the stack of its matrices; the way there and back."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Shaped

from optax_muon.parameters._blocks import Blocks


@dataclasses.dataclass(frozen=True)
class MatrixShape:
    """`count` matrices of `fan_in` rows and `fan_out` columns."""

    count: int
    fan_in: int
    fan_out: int


@dataclasses.dataclass(frozen=True)
class MatrixView:
    """How a leaf of any rank is a stack of matrices W: [fan_in, fan_out].

    Args:
        reduction_axes: the axes that the layer sums over; their product is fan_in, the rows.
        output_axes: the axes that the layer produces; their product is fan_out, the columns.
        blocks: cuts of a row or column axis into matrices of their own (`contiguous_blocks`,
            `interleaved_blocks`); several are applied one after the other, each to every block before it.

    Axes are axes of the leaf and may be negative. Every other axis is a batch axis: a stack of layers, of
    experts, or of heads that are to be orthogonalised alone.

    Raises:
        TypeError: an axis is no integer.
        ValueError: one of the two is empty. What depends on the shape (axes that overlap or exceed the rank,
            blocks that do not add up) raises where the shape is known, naming the leaf.

    Example:
        >>> MatrixView(0, 1).matrix_shapes((512, 2048))              # a Dense kernel
        (MatrixShape(count=1, fan_in=512, fan_out=2048),)
        >>> MatrixView((1, 2), 3).matrix_shapes((6, 8, 64, 512))     # six attention outputs (L, H, K, D)
        (MatrixShape(count=6, fan_in=512, fan_out=512),)
    """

    reduction_axes: int | Sequence[int]
    output_axes: int | Sequence[int]
    blocks: Blocks | Sequence[Blocks] | None = None

    def __post_init__(self) -> None:
        for name in ("reduction_axes", "output_axes"):
            axes = getattr(self, name)
            axes = tuple(axes) if isinstance(axes, Sequence) and not isinstance(axes, str) else axes
            for axis in axes if isinstance(axes, tuple) else (axes,):
                if not isinstance(axis, int) or isinstance(axis, bool):
                    raise TypeError(f"MatrixView: {name}={axes!r}; give an integer or a tuple of integers.")
            if axes == ():
                raise ValueError(
                    f"MatrixView: {name} is empty; a matrix needs at least one axis on each side."
                )
            object.__setattr__(self, name, axes)
        if isinstance(self.blocks, Sequence):
            object.__setattr__(self, "blocks", tuple(self.blocks) or None)
        for cut in self.cuts:
            if not isinstance(cut, Blocks):
                raise TypeError(
                    f"MatrixView: blocks={self.blocks!r}; use contiguous_blocks or interleaved_blocks."
                )

    def __str__(self) -> str:
        cuts = ", ".join(str(cut) for cut in self.cuts)
        cuts = f"({cuts})" if len(self.cuts) > 1 else cuts
        return (
            f"MatrixView(reduction_axes={self.reduction_axes}, output_axes={self.output_axes}"
            f"{', blocks=' + cuts if cuts else ''})"
        )

    @property
    def _reduction(self) -> tuple[int, ...]:
        return _as_tuple(self.reduction_axes)

    @property
    def _output(self) -> tuple[int, ...]:
        return _as_tuple(self.output_axes)

    @property
    def cuts(self) -> tuple[Blocks, ...]:
        """The blocks as a tuple, in the order in which they apply."""
        if self.blocks is None:
            return ()
        return (self.blocks,) if isinstance(self.blocks, Blocks) else tuple(self.blocks)

    def resolve(self, shape: Sequence[int], path: str = "") -> "MatrixView":
        """The same view with non-negative axes in tuples, checked against a leaf's shape.

        Args:
            shape: the leaf's shape.
            path: the leaf's path, for the message.

        Returns:
            A view that equals itself after another `resolve`.

        Raises:
            ValueError: an axis exceeds the rank, two axes overlap, a cut axis is a batch axis, or blocks do
                not add up to the length of their axis.
        """
        shape, ndim = tuple(shape), len(shape)
        where = f"`{path}`" if path else "the array"

        def positive(axis: int) -> int:
            if not -ndim <= axis < ndim:
                raise ValueError(
                    f"{where} has shape {shape}, but {self} names axis {axis}; "
                    f"its axes are {-ndim} to {ndim - 1}."
                )
            return axis % ndim

        reduction = tuple(positive(axis) for axis in self._reduction)
        output = tuple(positive(axis) for axis in self._output)
        if len(set(reduction + output)) < len(reduction + output):
            raise ValueError(
                f"{where} has shape {shape}, but {self} names an axis twice; "
                "an axis is a row, a column or a batch axis."
            )
        cuts = tuple(dataclasses.replace(cut, axis=positive(cut.axis)) for cut in self.cuts)
        for cut in cuts:
            if cut.axis not in reduction + output:
                raise ValueError(
                    f"{where}: {cut} cuts a batch axis of {self}, whose matrices are apart already. "
                    "Cut a reduction or an output axis, or drop the blocks."
                )
        view = MatrixView(reduction, output, cuts or None)
        _check_cuts(cuts, shape, where, shape)
        return view

    def batch_axes(self, ndim: int) -> tuple[int, ...]:
        """The axes of a leaf of this rank that are neither rows nor columns, in order."""
        used = {axis % ndim for axis in self._reduction + self._output}
        return tuple(axis for axis in range(ndim) if axis not in used)

    def unbatched(self, ndim: int) -> "MatrixView":
        """The same view of the leaf without its batch axes; the axes that stay keep their relative order."""
        batch = set(self.batch_axes(ndim))
        kept = [axis for axis in range(ndim) if axis not in batch]
        at = {axis: position for position, axis in enumerate(kept)}
        cuts = tuple(dataclasses.replace(cut, axis=at[cut.axis % ndim]) for cut in self.cuts)
        return MatrixView(
            tuple(at[axis % ndim] for axis in self._reduction),
            tuple(at[axis % ndim] for axis in self._output),
            cuts or None,
        )

    def matrix_shapes(self, shape: Sequence[int]) -> tuple[MatrixShape, ...]:
        """The matrices in a leaf of this shape: one entry per distinct shape, as in `to_matrices`."""
        view = self.resolve(shape)
        batch = math.prod(shape[axis] for axis in view.batch_axes(len(shape)))
        counts: dict[tuple[int, int], int] = {}
        for count, dims in _pieces(view.cuts, tuple(shape)):
            sides = view._fans(dims)
            counts[sides] = counts.get(sides, 0) + batch * count
        return tuple(MatrixShape(count, *sides) for sides, count in counts.items())

    def _fans(self, dims: Sequence[int]) -> tuple[int, int]:
        return math.prod(dims[a] for a in self._reduction), math.prod(dims[a] for a in self._output)


def to_matrices(x: Shaped[Array, "*shape"], view: MatrixView) -> tuple[Shaped[Array, "_ _ _"], ...]:
    """The matrices of a leaf.

    Args:
        x: the leaf.
        view: which of its axes are rows, columns and batch.

    Returns:
        One array [n, fan_in, fan_out] per distinct matrix shape, in the order of `view.matrix_shapes`; batch
        axes are flattened in order and the blocks of one shape stand inside them.

    Raises:
        ValueError: the view does not fit the shape.

    Example:
        >>> from optax_muon.parameters import contiguous_blocks
        >>> view = MatrixView(0, 1, contiguous_blocks(1, (8, 4, 4)))
        >>> [y.shape for y in to_matrices(jnp.zeros((6, 16)), view)]
        [(1, 6, 8), (2, 6, 4)]

    Note:
        Equal blocks cost a transposition; only blocks of different widths are sliced.
    """
    view = view.resolve(x.shape)
    batch_axes = view.batch_axes(x.ndim)
    rest = [axis for axis in range(x.ndim) if axis not in batch_axes]
    batch = math.prod(x.shape[axis] for axis in batch_axes)
    x = x.transpose(*batch_axes, *rest).reshape(batch, 1, *(x.shape[axis] for axis in rest))
    inner = view.unbatched(len(batch_axes) + len(rest))
    order = tuple(2 + axis for axis in inner._reduction + inner._output)
    groups: dict[tuple[int, int], list[Array]] = {}
    for piece in _cut_all(x, inner.cuts):
        sides = inner._fans(piece.shape[2:])
        groups.setdefault(sides, []).append(piece.transpose(0, 1, *order).reshape(*piece.shape[:2], *sides))
    out = []
    for sides, pieces in groups.items():
        y = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, 1)
        out.append(y.reshape(batch * y.shape[1], *sides))
    return tuple(out)


def from_matrices(
    matrices: Sequence[Shaped[Array, "_ _ _"]], view: MatrixView, shape: Sequence[int]
) -> Shaped[Array, "..."]:
    """The exact inverse of `to_matrices`.

    Args:
        matrices: one array [n, fan_in, fan_out] per distinct matrix shape.
        view: the view they were taken with.
        shape: the shape of the leaf.

    Returns:
        An array of shape `shape` and the dtype of `matrices`.

    Raises:
        ValueError: the view does not fit the shape.

    Example:
        >>> view = MatrixView((0, 1), 2)
        >>> x = jnp.arange(24.0).reshape(2, 3, 4)
        >>> bool((from_matrices(to_matrices(x, view), view, x.shape) == x).all())
        True
    """
    shape = tuple(shape)
    view = view.resolve(shape)
    batch_axes = view.batch_axes(len(shape))
    rest = tuple(axis for axis in range(len(shape)) if axis not in batch_axes)
    batch = math.prod(shape[axis] for axis in batch_axes)
    inner, dims = view.unbatched(len(shape)), tuple(shape[axis] for axis in rest)

    sides_of = [inner._fans(piece) for _, piece in _pieces(inner.cuts, dims)]
    by_sides = {}
    for sides, y in zip(dict.fromkeys(sides_of), matrices, strict=True):
        by_sides[sides] = y.reshape(batch, y.shape[0] // batch if batch else 0, *sides)
    order = inner._reduction + inner._output
    inverse = tuple(2 + order.index(axis) for axis in range(len(order)))
    taken = dict.fromkeys(by_sides, 0)
    pieces = []
    for (count, piece), sides in zip(_pieces(inner.cuts, dims), sides_of, strict=True):
        count = count if batch else 0
        y = by_sides[sides][:, taken[sides] : taken[sides] + count]
        taken[sides] += count
        y = y.reshape(batch, count, *(piece[axis] for axis in order))
        pieces.append(y.transpose(0, 1, *inverse))
    x = _join_all(iter(pieces), inner.cuts, dims)
    x = x.reshape(*(shape[axis] for axis in batch_axes), *dims)
    back = batch_axes + rest
    return x.transpose(*(back.index(axis) for axis in range(len(shape))))


def _as_tuple(axes: int | Sequence[int]) -> tuple[int, ...]:
    return (axes,) if isinstance(axes, int) else tuple(axes)


def _with(dims: tuple[int, ...], axis: int, length: int) -> tuple[int, ...]:
    return (*dims[:axis], length, *dims[axis + 1 :])


def _pieces(cuts: tuple[Blocks, ...], dims: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(number of blocks, their dims) for every piece, in the order in which `_cut_all` makes them."""
    if not cuts:
        yield 1, dims
        return
    for count, length in cuts[0].cut_shape(dims[cuts[0].axis]):
        for inner, piece in _pieces(cuts[1:], _with(dims, cuts[0].axis, length)):
            yield count * inner, piece


def _check_cuts(cuts: tuple[Blocks, ...], dims: tuple[int, ...], where: str, shape: tuple[int, ...]) -> None:
    if not cuts:
        return
    length = dims[cuts[0].axis]
    misfit = cuts[0].misfit(length)
    if misfit:
        raise ValueError(
            f"{where} has shape {shape}, but {cuts[0]} does not fit axis {cuts[0].axis}: {misfit}. "
            "Give sizes that add up to the length of the axis."
        )
    for _, width in cuts[0].cut_shape(length):
        _check_cuts(cuts[1:], _with(dims, cuts[0].axis, width), where, shape)


def _cut_all(x: Array, cuts: tuple[Blocks, ...]) -> list[Array]:
    if not cuts:
        return [x]
    return [piece for part in cuts[0].cut(x, 2 + cuts[0].axis) for piece in _cut_all(part, cuts[1:])]


def _join_all(pieces: Iterator[Array], cuts: tuple[Blocks, ...], dims: tuple[int, ...]) -> Array:
    if not cuts:
        return next(pieces)
    axis, length = cuts[0].axis, dims[cuts[0].axis]
    parts = [_join_all(pieces, cuts[1:], _with(dims, axis, block)) for _, block in cuts[0].cut_shape(length)]
    return cuts[0].join(parts, 2 + axis, length)
