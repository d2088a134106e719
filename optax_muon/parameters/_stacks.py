"""Whether a scan put its layer axis first or second: told by the leaves of the same scan."""

import dataclasses
from collections.abc import Iterator, Sequence


@dataclasses.dataclass(frozen=True)
class Member:
    """A leaf as far as stacking is concerned.

    Attributes:
        path: its components.
        shape: its shape.
        layers: the layer axes that are still possible; () for a leaf that is known to be unstacked, None if
            unknown.
        fans: (fan_in, fan_out) of a matrix for each of `layers`; () for a norm.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    layers: tuple[int, ...] | None
    fans: tuple[tuple[int, int], ...] = ()


def layer_axis(member: Member, members: Sequence[Member]) -> tuple[int, str]:
    """The layer axis of a leaf that allows both 0 and 1, and why.

    All leaves of one scan have the same number of layers on the same axis, and a scan carries what it reads:
    some width is both a fan_in and a fan_out. The largest directory around the leaf in which everything is
    stacked and only one axis fulfils both decides, then smaller ones. Where none does (an ensemble carries
    nothing), the common length alone decides; when that is no help either, the shorter axis: models are wider
    than deep.
    """
    units = list(_units(member, members))
    for unit in units:
        told = {m.layers[0] for m in unit if m.layers is not None and len(m.layers) == 1}
        # Names may put the layers of another leaf on an axis that this one has not, or cannot stack.
        if len(told) == 1 and (axis := told.pop()) in (member.layers or ()) and _same_length(axis, unit):
            return axis, "as the leaves around it"
        possible = [axis for axis in (0, 1) if _same_length(axis, unit) and _carries(axis, unit)]
        if len(possible) == 1:
            return possible[0], "the length that the leaves around it share"
    for unit in reversed(units):
        possible = [axis for axis in (0, 1) if _same_length(axis, unit)]
        # Lone kernels of different stacks may share a width, which is no depth.
        if possible == [0] or (
            possible == [1] and max(m.shape[1] for m in unit) <= max(m.shape[0] for m in unit)
        ):
            return possible[0], "the length that the leaves around it share"
    shorter = int(member.shape[1] < member.shape[0])
    return shorter, "guessed: the shorter of the first two; name the axes or add a Rule"


def _units(member: Member, members: Sequence[Member]) -> Iterator[list[Member]]:
    """The stacked leaves of each directory around a leaf, largest first, where nothing is unstacked."""
    for depth in range(len(member.path)):
        unit = [m for m in members if m.path[:depth] == member.path[:depth] and m.layers is not None]
        if all(m.layers for m in unit):
            yield unit


def _same_length(axis: int, unit: Sequence[Member]) -> bool:
    return all(axis < len(m.shape) for m in unit) and len({m.shape[axis] for m in unit}) == 1


def _carries(axis: int, unit: Sequence[Member]) -> bool:
    fans = [m.fans[m.layers.index(axis)] for m in unit if m.fans and m.layers and axis in m.layers]
    return not {n_in for n_in, _ in fans}.isdisjoint(n_out for _, n_out in fans)
