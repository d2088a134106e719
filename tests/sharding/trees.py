"""Leaves of every kind that the sharding layer has to carry, and the plain loop that it must equal."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from optax_muon.orthogonalization import KELLER, Orthogonalizer
from optax_muon.parameters import MatrixView, contiguous_blocks, from_matrices, to_matrices
from optax_muon.sharding import orthogonalize_leaves

# Two steps: enough to need the whole matrix, and half the compile time.
ORTHOGONALIZER = Orthogonalizer(method="newton_schulz", compute_dtype="float32", coefficients=KELLER[:2])

# name: shape and view. Wide, tall, attention, convolution, layer stacks at both ends, experts, blocks.
SHAPES = {
    "wide": ((16, 32), MatrixView(0, 1)),
    "tall": ((32, 16), MatrixView(0, 1)),
    "square": ((16, 16), MatrixView(0, 1)),
    "scanned": ((5, 16, 32), MatrixView(1, 2)),
    "layers_last": ((16, 32, 4), MatrixView(0, 1)),
    "query": ((16, 4, 8), MatrixView(0, (1, 2))),
    "out": ((4, 8, 16), MatrixView((0, 1), 2)),
    "conv": ((2, 2, 8, 16), MatrixView((0, 1, 2), 3)),
    "experts": ((2, 8, 16, 48), MatrixView(2, 3)),
    "qkv": ((3, 16, 64), MatrixView(1, 2, contiguous_blocks(2, (32, 16, 16)))),
    "gate_up": ((24, 32), MatrixView(0, 1, contiguous_blocks(1, (16, 16)))),
}
PATHS = list(SHAPES)
VIEWS = [view.resolve(shape) for shape, view in SHAPES.values()]


def leaves(dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape, _ in SHAPES.values()]


def ours(xs, *, views=None, paths=None, chunk=lambda m, n: 2, wire_dtype=jnp.float32, **kwargs):
    return orthogonalize_leaves(
        list(xs),
        views or VIEWS,
        paths or PATHS,
        orthogonalize=ORTHOGONALIZER.apply,
        cost=ORTHOGONALIZER.flops,
        chunk=chunk,
        wire_dtype=wire_dtype,
        **kwargs,
    )


def loop(xs, views=None):
    """One matrix stack of one leaf after the other, on one device."""
    return jax.jit(
        lambda xs: [
            from_matrices([ORTHOGONALIZER.apply(m) for m in to_matrices(x, view)], view, x.shape)
            for x, view in zip(xs, views or VIEWS, strict=True)
        ]
    )(xs)


def error(got, want):
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(got, want, strict=True))


def layout(name, sizes, a, b):
    """The spec of every leaf in a layout of that name over the mesh axes a and b; what does not divide stays whole."""
    out = []
    for shape, view in ((shape, view.resolve(shape)) for shape, view in SHAPES.values()):
        rows, columns = view.reduction_axes, view.output_axes
        batch = view.batch_axes(len(shape))
        first, last = (batch[0], batch[-1]) if batch else (None, None)
        wanted = {
            "replicated": {},
            "rows": {rows[0]: (a,)},
            "columns": {columns[0]: (a,)},
            "minor": {columns[-1]: (b,)},
            "both": {rows[0]: (a,), columns[0]: (b,)},
            "swapped": {rows[0]: (b,), columns[0]: (a,)},
            "two_axes": {columns[0]: (a, b)},
            "two_axes_swapped": {rows[-1]: (b, a)},
            "stack": {first: (b,)},
            "experts": {last: (b,), rows[0]: (a,)},
        }[name]
        spec, used = [None] * len(shape), set()
        for axis, names in wanted.items():
            names = tuple(dict.fromkeys(name for name in names if name not in used))
            if axis is not None and names and shape[axis] % math.prod(sizes[n] for n in names) == 0:
                spec[axis] = names if len(names) > 1 else names[0]
                used |= set(names)
        out.append(P(*spec))
    return out


def mixed_layout(sizes, a, b):
    """Another layout for each leaf, and two leaves that share a group though they are cut differently."""
    every = [layout(name, sizes, a, b) for name in LAYOUTS]
    return [every[i % len(LAYOUTS)][i] for i in range(len(SHAPES))]


LAYOUTS = (
    "replicated",
    "rows",
    "columns",
    "minor",
    "both",
    "swapped",
    "two_axes",
    "two_axes_swapped",
    "stack",
    "experts",
)


def put(xs, specs, mesh):
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(xs, specs, strict=True)]


def make_mesh(shape, names, kind):
    count = math.prod(shape)
    return jax.make_mesh(shape, names, devices=jax.devices()[:count], axis_types=(kind,) * len(shape))
