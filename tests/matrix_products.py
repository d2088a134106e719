"""The matrix products of a program, read off its jaxpr: the compiler's count takes the body of a loop once."""

import math
from typing import NamedTuple

import jax


class Product(NamedTuple):
    shape: tuple[int, ...]  # of the result
    flops: int  # of one execution
    times: int  # how often the scans around it run it
    around: tuple[str, ...]  # the primitives around it, outermost first


def products(function, *args):
    """Every dot_general of `function(*args)`."""
    return list(_walk(jax.make_jaxpr(function)(*args).jaxpr, 1, ()))


def flops(function, *args):
    """Operations in matrix products, as the compiler counts them where no loop is."""
    return sum(p.flops * p.times for p in products(function, *args))


def _walk(jaxpr, times, around):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contract, _), _ = eqn.params["dimension_numbers"]
            left, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
            yield Product(out, 2 * math.prod(out) * math.prod(left[axis] for axis in contract), times, around)
        inner = times * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
        for sub in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(getattr(x, "jaxpr", x), "eqns")):
            sub = getattr(sub, "jaxpr", sub)
            if hasattr(sub, "eqns"):
                yield from _walk(sub, inner, (*around, eqn.primitive.name))
