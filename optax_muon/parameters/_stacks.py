"""Whether a scan put its layer axis first or second: told by the leaves of the same scan."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Member:
    """A leaf as far as stacking is concerned.

    Attributes:
        path: its components.
        shape: its shape.
        layers: the layer axes that are still possible; () for a leaf that is known to be unstacked, None if
            unknown.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    layers: tuple[int, ...] | None


def layer_axis(member: Member, members: Sequence[Member]) -> tuple[int, str]:
    """The layer axis of a leaf that allows both 0 and 1, and why.

    All leaves of one scan have the same number of layers on the same axis. Directories are searched outwards
    from the leaf while everything in them is stacked; the first that allows one axis alone decides. When none
    does, the
    shorter axis is taken: models are wider than deep.
    """
    for depth in range(len(member.path) - 1, -1, -1):
        unit = [m for m in members if m.path[:depth] == member.path[:depth] and m.layers is not None]
        if any(m.layers == () for m in unit):
            break
        settled = {m.layers[0] for m in unit if m.layers is not None and len(m.layers) == 1}
        if len(settled) == 1:
            return settled.pop(), "as the leaves around it"
        if not settled:
            possible = [axis for axis in (0, 1) if _plausible(axis, unit)]
            if len(possible) == 1:
                return possible[0], "the length that all leaves around it share"
    return int(
        member.shape[1] < member.shape[0]
    ), "guessed: the shorter of the first two; name the axes or add a Rule"


def _plausible(axis: int, unit: Sequence[Member]) -> bool:
    lengths = {m.shape[axis] for m in unit}
    # Lone kernels of different stacks can share a width by chance; as a depth it would exceed the rest.
    return len(lengths) == 1 and (len(unit) == 1 or max(lengths) <= max(m.shape[1 - axis] for m in unit))
