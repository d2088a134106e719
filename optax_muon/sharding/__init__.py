"""Where each stack of matrices is computed and stored. Knows no optimizer and no framework."""

from optax_muon.sharding._buckets import Batch, Group, Part, Plan, make_plan
from optax_muon.sharding._layer_sharding import orthogonalize_leaves
from optax_muon.sharding._mesh import Placement, find_placement, platform_of
from optax_muon.sharding._state_sharding import (
    constrain,
    is_spec,
    like_param,
    reshard_like,
    shard_further,
    zeros_like_param,
)
from optax_muon.sharding._units import Kind, LeafSpec

__all__ = [
    "Batch",
    "Group",
    "Kind",
    "LeafSpec",
    "Part",
    "Placement",
    "Plan",
    "constrain",
    "find_placement",
    "is_spec",
    "like_param",
    "make_plan",
    "orthogonalize_leaves",
    "platform_of",
    "reshard_like",
    "shard_further",
    "zeros_like_param",
]
