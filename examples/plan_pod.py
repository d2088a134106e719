"""What Muon's state, exchange and update cost for a model on a TPU pod, worked out on any machine.

    python examples/plan_pod.py                                      # five published models, arithmetic only
    python examples/plan_pod.py --models Kimi-K2 --compile           # and the update compiled by the real TPU compiler
    python examples/plan_pod.py --params my_model:abstract_params --topology v5p:4x4x4 --mesh data=8,model=8

Nothing is allocated: parameters are shapes. `--params module:function` names a function without arguments that returns
your tree of `jax.ShapeDtypeStruct` (for instance `jax.eval_shape(model.init, ...)`). `--compile` needs `pip install
libtpu` (x86-64 Linux, no TPU).
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import re
import sys
import time
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh
from published_models import MODELS, place

import optax_muon
from optax_muon import recipes

GIB = 2**30
# The recipe of each model's authors (Qwen's used AdamW), and a pod that such a model is trained on.
RECIPES = {
    "Qwen2.5-3B": optax_muon.muon,
    "Moonlight-16B-A3B": recipes.moonlight,
    "Kimi-K2": recipes.kimi_k2,
    "GLM-5": recipes.glm5,
    "DeepSeek-V4-Flash": recipes.deepseek_v4,
    "DeepSeek-V4-Pro": recipes.deepseek_v4,
}
PODS = {
    "Qwen2.5-3B": ("v5e:2x4", "data=8"),
    "Moonlight-16B-A3B": ("v5p:4x4x4", "data=64"),
    "Kimi-K2": ("v5p:8x8x16", "data=64,model=16"),
    "GLM-5": ("v5p:8x8x16", "data=64,model=16"),
    "DeepSeek-V4-Flash": ("v5p:8x8x8", "data=64,model=8"),
    "DeepSeek-V4-Pro": ("v5p:8x8x16", "data=64,model=16"),
}
DEFAULT = ("Qwen2.5-3B", "Moonlight-16B-A3B", "Kimi-K2", "GLM-5", "DeepSeek-V4-Pro")


def state_bytes(optimizer: optax.GradientTransformation, params) -> int:
    """Bytes of the whole optimizer state, whatever its distribution."""
    state = jax.eval_shape(optimizer.init, params)
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))


def per_chip(optimizer: optax.GradientTransformation, params) -> int:
    """Bytes of the state on one chip, when it lies as its parameters do."""
    shardings = jax.tree.leaves(optax_muon.state_shardings(optimizer, params))
    state = jax.tree.leaves(jax.eval_shape(optimizer.init, params))
    sides = zip(state, shardings, strict=True)
    return sum(math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize for x, s in sides)


def exchange_bytes(optimizer, params, wire: int = 2) -> int:
    """The least that a chip must send and receive per update: cut matrices to their owners and back, in bfloat16."""
    total = 0
    leaves = jax.tree.leaves(params)
    for row, leaf in zip(optax_muon.describe(params, optimizer).rows, leaves, strict=True):
        if row.label != "muon":
            continue
        batch = row.view.batch_axes(leaf.ndim)
        cut = any(entry for axis, entry in enumerate(leaf.sharding.spec) if axis not in batch)
        total += 2 * wire * math.prod(leaf.sharding.shard_shape(leaf.shape)) if cut else 0
    return total


def routing(optimizer, params) -> str:
    """How many parameters and matrices take Muon."""
    sizes, matrices = Counter(), Counter()
    for row in optax_muon.describe(params, optimizer).rows:
        sizes[row.label] += math.prod(row.shape)
        for shape in row.view.matrix_shapes(row.shape) if row.label == "muon" else ():
            matrices[shape.fan_in, shape.fan_out] += shape.count
    share = sizes["muon"] / sum(sizes.values())
    largest = ", ".join(f"{n:,} of {i} x {o}" for (i, o), n in matrices.most_common(3))
    total = sum(sizes.values()) / 1e9
    found = f"{matrices.total():,} matrices ({largest}, ..)"
    return f"{share:.1%} of {total:,.2f}B parameters on Muon: {found}"


def parse_mesh(text: str) -> dict[str, int]:
    sizes = {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    if not sizes or min(sizes.values()) < 1:
        raise SystemExit(f"--mesh {text!r}: write axis names with sizes, such as data=64,model=16.")
    return sizes


def tpu_devices(topology: str):
    """Devices of a topology that no machine here has."""
    from jax.experimental import topologies

    # Without these, libtpu asks the cloud's metadata server where it is.
    for name, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }.items():
        os.environ.setdefault(name, value)
    return np.array(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)


def compile_update(optimizer, params) -> str:
    """Compiles the update with the real TPU compiler and says what it holds."""
    shardings = optax_muon.state_shardings(optimizer, params)
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(optimizer.init, params),
        shardings,
    )
    start = time.perf_counter()
    compiled = jax.jit(optimizer.update, donate_argnums=(0, 1)).lower(params, state, params).compile()
    seconds, memory = time.perf_counter() - start, compiled.memory_analysis()
    pattern = r"= \S+ (all-to-all|all-gather|all-reduce|reduce-scatter)(?:-start)?\("
    kinds = Counter(re.findall(pattern, compiled.as_text()))
    exchanged = ", ".join(f"{n} {kind}" for kind, n in kinds.items()) or "no collective"
    return (
        f"compiled in {seconds:.0f} s: {exchanged}; temporaries {memory.temp_size_in_bytes / GIB:.2f} GiB beside "
        f"{memory.argument_size_in_bytes / GIB:.2f} GiB of parameters, gradients and state per chip"
    )


def report(name: str, params, make, topology: str, axes: dict[str, int], compiling: bool) -> str:
    muon, adamw = make(1e-3), optax.adamw(1e-3)
    if compiling:
        types = (AxisType.Explicit,) * len(axes)
        mesh = Mesh(tpu_devices(topology).reshape(tuple(axes.values())), tuple(axes), axis_types=types)
    else:
        mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Explicit,) * len(axes))
    placed = place(params, mesh)
    whole = {label: state_bytes(optimizer, params) for label, optimizer in (("AdamW", adamw), ("Muon", muon))}
    chips = {label: per_chip(optimizer, placed) for label, optimizer in (("AdamW", adamw), ("Muon", muon))}
    lines = [
        f"{name} on {topology} ({', '.join(f'{n}={s}' for n, s in axes.items())}: {mesh.size} chips)",
        f"  {routing(muon, params)}",
        f"  optimizer state {whole['AdamW'] / GIB:,.2f} GiB with AdamW, {whole['Muon'] / GIB:,.2f} GiB with Muon: "
        f"{1 - whole['Muon'] / whole['AdamW']:.1%} less",
        f"  per chip        {chips['AdamW'] / GIB:,.3f} GiB with AdamW, {chips['Muon'] / GIB:,.3f} GiB with Muon",
        f"  exchange        {exchange_bytes(muon, placed) / GIB:,.3f} GiB per chip and update in bfloat16, at least",
    ]
    if compiling:
        lines.append(f"  {compile_update(muon, placed)}")
    return "\n".join(lines)


def users_params(spec: str):
    """The tree that `module:function` returns."""
    module, _, function = spec.partition(":")
    if not function:
        raise SystemExit(
            f"--params {spec!r}: write module:function, a function that returns abstract parameters."
        )
    sys.path.insert(0, os.getcwd())
    return getattr(importlib.import_module(module), function)()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=DEFAULT)
    parser.add_argument("--params", metavar="MODULE:FUNCTION", help="your own model instead")
    parser.add_argument("--topology", help="such as v5p:8x8x16; with --params, or for all models")
    parser.add_argument("--mesh", help="such as data=64,model=16")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of parameters and state"
    )
    parser.add_argument("--compile", action="store_true", help="compile the update with libtpu")
    parser.add_argument("--describe", action="store_true", help="every decision, not the summary alone")
    arguments = parser.parse_args()
    if arguments.params:
        chosen = {arguments.params: (users_params(arguments.params), optax_muon.muon)}
    else:
        dtype = jnp.dtype(arguments.dtype)
        chosen = {name: (MODELS[name](dtype), RECIPES[name]) for name in arguments.models}
    for name, (params, make) in chosen.items():
        topology, mesh = PODS.get(name, ("v5p:4x4x4", "data=64"))
        axes = parse_mesh(arguments.mesh or mesh)
        if arguments.describe:
            print(optax_muon.describe(params, make(1e-3)))
        text = report(name, params, make, arguments.topology or topology, axes, arguments.compile)
        print(text, flush=True)


if __name__ == "__main__":
    main()
