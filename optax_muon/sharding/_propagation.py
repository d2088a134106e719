"""Two words to the compiler's sharding propagation, for Auto meshes where nobody says how an array lies.

The exchange has to assume some layout. Left alone, the compiler would carry that assumption backwards into the momentum
and forwards into the parameters, which would come out of the step cut otherwise than they went in.
"""

import contextlib
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

ir: Any = None
sdy: Any = None  # the dialect of the Shardy partitioner
with contextlib.suppress(ImportError):
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

_NO_DIRECTION, _FORWARD = 0, 1
_next_group = iter(range(1 << 40, 1 << 62))  # far from the numbers of anybody else in the same module


def forward_only(x: Array) -> Array:
    """x; how the result is used does not change how x lies."""
    return _forward_only_p.bind(x)


def lies_like(x: Array, reference: Array) -> Array:
    """x, laid out as `reference` of the same shape is, whatever that turns out to be."""
    return _lies_like_p.bind(x, reference)


def _shardy() -> bool:
    return sdy is not None and jax.config.jax_use_shardy_partitioner  # pyright: ignore[reportAttributeAccessIssue]


def _barrier(x: Any, direction: int) -> Any:
    return sdy.PropagationBarrierOp(x, ir.IntegerAttr.get(ir.IntegerType.get_signless(32), direction)).result


def _lower_forward_only(ctx: Any, x: Any) -> list[Any]:
    del ctx
    return [_barrier(x, _FORWARD)] if _shardy() else [x]


def _lower_lies_like(ctx: Any, x: Any, reference: Any) -> list[Any]:
    del ctx
    if _shardy():
        x = _barrier(x, _NO_DIRECTION)  # else the group would take over how the exchange left x
        group = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), next(_next_group))
        sdy.ShardingGroupOp(x, group)
        sdy.ShardingGroupOp(reference, group)
    return [x]


def _identity_primitive(name: str, lower: Any) -> Primitive:
    """A primitive that returns its first argument and is linear in it."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x, *_: x)
    primitive.def_abstract_eval(lambda x, *_: x)
    mlir.register_lowering(primitive, lower)
    ad.primitive_jvps[primitive] = lambda primals, tangents: (primitive.bind(*primals), tangents[0])
    # Under vmap the words refer to another array than the one that was meant, and are dropped.
    batching.primitive_batchers[primitive] = lambda args, dims: (args[0], dims[0])
    return primitive


_forward_only_p = _identity_primitive("forward_only", _lower_forward_only)
_lies_like_p = _identity_primitive("lies_like", _lower_lies_like)
