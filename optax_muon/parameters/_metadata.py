"""What logical axis names (Linen boxes, NNX Variables, Haliax arrays) say: vocabulary, batch axes, where heads end."""

import itertools
import re

from optax_muon.parameters._paths import Leaf

VOCAB = {"vocab", "vocabulary", "vocab_size"}
BATCH = {"layers", "layer", "num_layers", "stack", "stage", "stages", "expert", "experts", "exp"}
BATCH |= {"o_groups"}  # DeepSeek-V4 in MaxText: a grouped projection
FUSED = {"qkv", "kv_pair"}
BATCH |= FUSED
# MaxText names each of its scans: dense_layers, moe_layers, local_layers, layers_per_stage, scanned_blocks.
_SCAN = re.compile(r"(\w+_)?(layers|blocks)(_\w+)?")
EXPERT = {"expert", "experts", "exp"}
HEADS = {
    "heads",
    "q_heads",
    "kv_heads",
    "kv",
    "head_dim",
    "kv_head_dim",
    "num_heads",
    "q_head_dim",
    "v_head_dim",
}
# Names that decide nothing, but show that the axes are named logically, so that no stack goes unnamed.
OTHER = {"embed", "mlp", "joined_kv", "hidden", "model", "features", "lora", "q_lora", "kv_lora", "norm"}


def has_vocabulary(leaf: Leaf) -> bool:
    """Whether one axis counts tokens."""
    return leaf.names is not None and not VOCAB.isdisjoint(leaf.names)


def batch_axes(leaf: Leaf) -> frozenset[int] | None:
    """The batch axes by name, or None when the names are none of ours (mesh axes, for instance)."""
    names = leaf.names
    if names is None:
        return None
    axes = {axis for axis, name in enumerate(names) if name is not None and _is_batch(name)}
    if not axes and (HEADS | OTHER).isdisjoint(names):
        return None
    if leaf.ndim - len(axes) < 2:
        # A router (embed, expert) has one column per expert; it is no stack of vectors.
        axes -= {axis for axis in axes if names[axis] in EXPERT}
    return frozenset(axes)


def _is_batch(name: str) -> bool:
    return name in BATCH or _SCAN.fullmatch(name) is not None


def layout(leaf: Leaf) -> str | None:
    """The layout of the axes that are left without the batch, or None when the names do not decide it."""
    batch = batch_axes(leaf)
    if batch is None or leaf.names is None:
        return None
    names = [name for axis, name in enumerate(leaf.names) if axis not in batch]
    if len(names) < 3:
        return None
    heads = [name in HEADS for name in names]
    if heads[0] == heads[-1] or sum(a != b for a, b in itertools.pairwise(heads)) != 1:
        return None
    split = heads.index(not heads[0])
    return " ".join(["in"] * split + ["out"] * (len(names) - split))
