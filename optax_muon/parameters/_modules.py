"""What a framework's own module says about the arrays it owns: role, layout, groups."""

import dataclasses

from optax_muon.parameters import _equinox, _haliax, _linen, _nnx
from optax_muon.parameters._paths import Leaf, Owner

_TABLES = {
    "equinox": _equinox.MODULES,
    "nnx": _nnx.MODULES,
    "linen": _linen.MODULES,
    "haliax": _haliax.MODULES,
}


@dataclasses.dataclass(frozen=True)
class ModuleSays:
    """`layout` is '' for leaves that are no matrix; `groups` counts the groups of a grouped convolution."""

    cls: str
    role: str
    layout: str
    groups: int = 1


def module_says(leaf: Leaf) -> ModuleSays | None:
    """The entry of the module tables for a leaf, or None when its owner is unknown."""
    owner = leaf.owner
    if owner is None:
        return None
    for cls in owner.classes:
        entry = _TABLES[owner.framework].get(cls, {}).get(leaf.path.rsplit("/", 1)[-1])
        if entry is not None:
            role, layout = entry
            name = f"{owner.framework}.{cls}"
            if layout == "conv":
                return _convolution(name, owner, leaf)
            if layout == "general":
                layout = _general(owner)
            if layout == "named":
                role, layout = _haliax.named_axes(owner, leaf)
            return ModuleSays(name, role, layout) if layout or role != "hidden" else None
    return None


def _convolution(name: str, owner: Owner, leaf: Leaf) -> ModuleSays:
    if owner.framework == "equinox":
        spatial, groups = owner.fact("num_spatial_dims"), owner.fact("groups") or 1
        layout = "out in" + " in" * spatial
        per_group = leaf.shape[-spatial - 1]
    else:
        size, groups = owner.fact("kernel_size"), owner.fact("feature_group_count") or 1
        layout = "in " * (1 if isinstance(size, int) else len(size)) + "in out"
        per_group = leaf.shape[-2]
    depthwise = groups > 1 and per_group == 1
    return ModuleSays(name, "depthwise" if depthwise else "hidden", layout, groups)


def _general(owner: Owner) -> str:
    n_in = _count(owner.fact("in_features") if owner.framework == "nnx" else owner.fact("axis"))
    n_out = _count(owner.fact("out_features") if owner.framework == "nnx" else owner.fact("features"))
    n_batch = _count(owner.fact("batch_dims") or ())
    if owner.fact("batch_axis") or not n_in or not n_out:
        return ""
    return " ".join(["stack"] * n_batch + ["in"] * n_in + ["out"] * n_out)


def _count(value: object) -> int:
    return len(value) if isinstance(value, tuple) else 0 if value is None else 1
