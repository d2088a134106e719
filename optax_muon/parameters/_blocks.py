"""How several matrices lie inside one axis of a leaf: fused QKV, gate and up, heads."""

import dataclasses
import math
from collections.abc import Sequence
from typing import TypeAlias

import jax.numpy as jnp
from jaxtyping import Array, Shaped

# Arrays in this module are [batch, block, *axes]: a cut moves a piece of one of the axes into the block axis.
Stack: TypeAlias = Shaped[Array, "_ _ ..."]


@dataclasses.dataclass(frozen=True)
class _Run:
    """Neighbouring blocks of one size: `count` of them start at `offset` of the period."""

    offset: int
    count: int


@dataclasses.dataclass(frozen=True)
class _Piece:
    """All blocks of one size along the axis."""

    size: int
    runs: tuple[_Run, ...]

    @property
    def per_period(self) -> int:
        return sum(run.count for run in self.runs)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Where one axis of a leaf is cut; made by `contiguous_blocks` and `interleaved_blocks`.

    Attributes:
        axis: the axis of the leaf that is cut.
        sizes: widths of the blocks in order; or one width for as many equal blocks as fit.
        repeats: how often the sequence of blocks stands along the axis.
        interleaved: number of interleaved blocks, or None when contiguous.
    """

    axis: int
    sizes: int | tuple[int, ...] | None
    repeats: int = 1
    interleaved: int | None = None

    def __str__(self) -> str:
        if self.interleaved is not None:
            return f"interleaved_blocks({self.axis}, {self.interleaved})"
        repeats = "" if self.repeats == 1 else f", repeats={self.repeats}"
        return f"contiguous_blocks({self.axis}, {self.sizes}{repeats})"

    def misfit(self, length: int) -> str | None:
        """Says why an axis of this length cannot be cut so, or returns None."""
        if self.interleaved is not None:
            if length % self.interleaved:
                return f"{length} is no multiple of {self.interleaved}"
        elif isinstance(self.sizes, int):
            if length % (self.sizes * self.repeats):
                return f"{length} is no multiple of {self.sizes * self.repeats}"
        else:
            total = sum(self._sizes) * self.repeats
            if total != length:
                times = "" if self.repeats == 1 else f" times {self.repeats} repeats"
                return f"the sizes{times} sum to {total}, the axis has {length}"
        return None

    @property
    def _sizes(self) -> tuple[int, ...]:
        return self.sizes if isinstance(self.sizes, tuple) else ()

    def _layout(self, length: int) -> tuple[int, int, tuple[_Piece, ...]]:
        """The axis as (repeats, periods, width of a period), and the pieces inside one period."""
        if isinstance(self.sizes, int):
            size = self.sizes
            return self.repeats, length // (size * self.repeats), (_Piece(size, (_Run(0, 1),)),)
        sizes = self._sizes
        period = next(p for p in range(1, len(sizes) + 1) if sizes == sizes[:p] * (len(sizes) // p))
        runs: dict[int, list[_Run]] = {}
        offset, previous = 0, None
        for size in sizes[:period]:
            if size == previous:
                last = runs[size][-1]
                runs[size][-1] = _Run(last.offset, last.count + 1)
            else:
                runs.setdefault(size, []).append(_Run(offset, 1))
            offset, previous = offset + size, size
        pieces = tuple(_Piece(size, tuple(r)) for size, r in runs.items())
        return self.repeats, len(sizes) // period, pieces

    def cut_shape(self, length: int) -> tuple[tuple[int, int], ...]:
        """(number of blocks, width of the block) for each distinct width along an axis of this length."""
        if self.interleaved is not None:
            return ((self.interleaved, length // self.interleaved),)
        repeats, periods, pieces = self._layout(length)
        return tuple((periods * piece.per_period, repeats * piece.size) for piece in pieces)

    def cut(self, x: Stack, axis: int) -> list[Stack]:
        """Cuts `axis` of x: one stack per entry of `cut_shape`. Equal blocks cost a reshape, not slices."""
        length = x.shape[axis]
        before, after = x.shape[2:axis], x.shape[axis + 1 :]
        if self.interleaved is not None:
            x = x.reshape(*x.shape[:axis], length // self.interleaved, self.interleaved, *after)
            return [_merge_into_blocks(x, (axis + 1,))]
        repeats, periods, pieces = self._layout(length)
        width = sum(piece.size * piece.per_period for piece in pieces)
        x = x.reshape(*x.shape[:2], *before, repeats, periods, width, *after)
        out = []
        for piece in pieces:
            runs = [_take_run(x, axis + 2, run, piece.size) for run in piece.runs]
            part = runs[0] if len(runs) == 1 else jnp.concatenate(runs, axis + 2)
            part = _merge_into_blocks(part, (axis + 1, axis + 2))  # now [..., repeats, size, ...]
            out.append(part.reshape(*part.shape[:2], *before, repeats * piece.size, *after))
        return out

    def join(self, parts: Sequence[Stack], axis: int, length: int) -> Stack:
        """Exact inverse of `cut`."""
        before, after = parts[0].shape[2:axis], parts[0].shape[axis + 1 :]
        blocks = math.prod(n for n, _ in self.cut_shape(length)[:1])
        batch = parts[0].shape[0]
        outer = parts[0].shape[1] // blocks if blocks else 0
        if self.interleaved is not None:
            x = parts[0].reshape(batch, outer, self.interleaved, *before, length // self.interleaved, *after)
            return jnp.moveaxis(x, 2, axis + 1).reshape(batch, outer, *before, length, *after)
        repeats, periods, pieces = self._layout(length)
        placed: list[tuple[int, Array]] = []
        for piece, part in zip(pieces, parts, strict=True):
            x = part.reshape(batch, outer, periods, piece.per_period, *before, repeats, piece.size, *after)
            x = jnp.moveaxis(x, (2, 3), (axis + 1, axis + 2))
            start = 0
            for run in piece.runs:
                y = x[(slice(None),) * (axis + 2) + (slice(start, start + run.count),)]
                start += run.count
                y = y.reshape(batch, outer, *before, repeats, periods, run.count * piece.size, *after)
                placed.append((run.offset, y))
        ordered = [y for _, y in sorted(placed, key=lambda item: item[0])]
        x = ordered[0] if len(ordered) == 1 else jnp.concatenate(ordered, axis + 2)
        return x.reshape(batch, outer, *before, length, *after)


def contiguous_blocks(axis: int, sizes: int | Sequence[int], repeats: int = 1) -> Blocks:
    """Blocks that lie one after the other along an axis.

    Along the axis stand `repeats` groups, each `[size 0 | size 1 | ...]`. Block k is the concatenation of the
    k-th parts of all groups, so that a fused GQA kernel stored per query group gives one Q, one K, one V.

    Args:
        axis: the axis of the leaf (negative counts from the end).
        sizes: widths of the blocks, or one integer: as many blocks of this width as fit (for heads, give the
            head width, which stays true on a shard, rather than the number of heads).
        repeats: number of groups; `sum(sizes) * repeats` must be the length of the axis.

    Returns:
        A value for `MatrixView(blocks=...)`.

    Raises:
        ValueError: no sizes, or a size or `repeats` below 1.

    Example:
        >>> print(contiguous_blocks(1, (64, 16, 16)))        # [Q | K | V]
        contiguous_blocks(1, (64, 16, 16))
        >>> print(contiguous_blocks(-1, 128))                # each head of width 128 alone
        contiguous_blocks(-1, 128)

    Source:
        The layouts are those of BERT-like (sectioned) and Megatron-like (per query group) fused projections.
    """
    if isinstance(sizes, Sequence):
        sizes = tuple(int(size) for size in sizes)
        if not sizes:
            raise ValueError(f"contiguous_blocks({axis}, ()): give at least one size.")
    least = min(sizes) if isinstance(sizes, tuple) else sizes
    if least < 1 or repeats < 1:
        raise ValueError(
            f"contiguous_blocks({axis}, {sizes}, repeats={repeats}): sizes and repeats must be at least 1."
        )
    return Blocks(axis, sizes, repeats)


def interleaved_blocks(axis: int, count: int) -> Blocks:
    """Blocks that alternate along an axis: entry j belongs to block j % count (gate and up in GPT-OSS).

    Args:
        axis: the axis of the leaf (negative counts from the end).
        count: number of blocks; the length of the axis must be a multiple of it.

    Returns:
        A value for `MatrixView(blocks=...)`.

    Raises:
        ValueError: `count` below 1.

    Example:
        >>> print(interleaved_blocks(-1, 2))
        interleaved_blocks(-1, 2)
    """
    if count < 1:
        raise ValueError(f"interleaved_blocks({axis}, {count}): count must be at least 1.")
    return Blocks(axis, None, 1, count)


def _take_run(x: Array, axis: int, run: _Run, size: int) -> Array:
    """[..., width, ...] -> [..., run.count, size, ...]; no slice when the run is the whole period."""
    if run.count * size != x.shape[axis]:
        x = x[(slice(None),) * axis + (slice(run.offset, run.offset + run.count * size),)]
    return x.reshape(*x.shape[:axis], run.count, size, *x.shape[axis + 1 :])


def _merge_into_blocks(x: Array, axes: tuple[int, ...]) -> Array:
    """Moves `axes` behind the block axis 1 and flattens them into it."""
    x = jnp.moveaxis(x, axes, tuple(range(2, 2 + len(axes))))
    count = math.prod(x.shape[1 : 2 + len(axes)])
    return x.reshape(x.shape[0], count, *x.shape[2 + len(axes) :])
