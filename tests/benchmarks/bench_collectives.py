"""One update compiled for TPU pods, which no machine here has: what moves between chips, what is alive, how long it
compiles; ours beside optax.contrib.muon. With `--cpu`, the time of one update on 8 CPU devices and on one.

Bytes are output bytes of collectives on one device, times the trip counts of the loops around them. The bound is
what must move at least: every matrix to one owner and back in bfloat16. `optimal_seconds` is the compiler's own cost
model and only good as a ratio. Compile times are processor seconds, which a busy machine disturbs less.

    python tests/benchmarks/bench_collectives.py
    python tests/benchmarks/bench_collectives.py --only llama_scanned --cpu
"""

import argparse
import dataclasses
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable
from importlib.metadata import version

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
import optax
import record
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_muon
from tests import tpu_topology

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
SIDE, LONG, SHORT = 4096, 14336, 1024
LLAMA = {"q": (SIDE, SIDE), "k": (SIDE, SHORT), "v": (SIDE, SHORT), "o": (SIDE, SIDE)}
LLAMA |= {"gate": (SIDE, LONG), "up": (SIDE, LONG), "down": (LONG, SIDE)}


def scanned(layers: int = 32) -> dict:
    return {name: (layers, *shape) for name, shape in LLAMA.items()}


def unscanned(layers: int = 32) -> dict:
    return {f"{i}_{name}": shape for i in range(layers) for name, shape in LLAMA.items()}


def equal(count: int, shape: tuple[int, ...] = (1024, 4096)) -> dict:
    return {f"w{i}": shape for i in range(count)}


@dataclasses.dataclass(frozen=True)
class Program:
    """A tree on a mesh. `peer`: whether the peer compiles it in reasonable time; on Explicit meshes it raises."""

    topology: str
    mesh: tuple[int, ...]
    names: tuple[str, ...]
    tree: Callable[[], dict]
    spec: Callable[[tuple[int, ...]], P]
    mode: AxisType = EXPLICIT
    told: bool = True
    dtype: str = "float32"
    peer: bool = False


def last_two(*spec) -> Callable[[tuple[int, ...]], P]:
    return lambda shape: P(*[None] * (len(shape) - 2), *spec)


def long_side(shape: tuple[int, ...]) -> P:
    return P("fsdp", "tensor") if shape[0] <= shape[1] else P("tensor", "fsdp")


POD, SQUARE = ("v5p:4x4x4", (64,), ("fsdp",)), ("v5e:16x16", (16, 16), ("fsdp", "tensor"))
GRID = ("v5p:4x4x4", (8, 8), ("fsdp", "tensor"))
PROGRAMS = {
    "llama_scanned": Program(*POD, scanned, last_two("fsdp", None), mode=AUTO, peer=True),
    "llama_scanned_explicit": Program(*POD, scanned, last_two("fsdp", None)),
    "llama_unscanned": Program(*POD, unscanned, last_two("fsdp", None)),
    "llama_two_axes": Program(*SQUARE, unscanned, last_two("fsdp", "tensor")),
    "equal_512": Program(*SQUARE, lambda: equal(512), last_two("fsdp", "tensor")),
    "equal_512_auto": Program(*SQUARE, lambda: equal(512), last_two("fsdp", "tensor"), mode=AUTO),
    "equal_16": Program(*SQUARE, lambda: equal(16), last_two("fsdp", "tensor"), mode=AUTO, peer=True),
    "equal_8": Program(
        "v5e:2x4", (2, 4), ("fsdp", "tensor"), lambda: equal(8), last_two("fsdp", "tensor"), mode=AUTO, peer=True
    ),
    "replicated": Program("v5e:2x4", (8,), ("data",), lambda: equal(64), last_two(None, None)),
    "trillion": Program(
        "v5p:8x8x16", (64, 16), ("expert", "fsdp"),
        lambda: dict.fromkeys(("gate", "up", "down"), (60, 384, 7168, 2048)),
        lambda shape: P(None, "expert", None, "fsdp"), dtype="bfloat16",
    ),
    # Auto meshes where nobody says how the leaves lie: what param_specs= gains.
    "untold_fsdp": Program(*GRID, lambda: equal(64), last_two("fsdp", None), mode=AUTO, told=False),
    "told_fsdp": Program(*GRID, lambda: equal(64), last_two("fsdp", None), mode=AUTO),
    "untold_tensor": Program(*GRID, lambda: equal(64), last_two(None, "tensor"), mode=AUTO, told=False),
    "told_tensor": Program(*GRID, lambda: equal(64), last_two(None, "tensor"), mode=AUTO),
    "untold_both": Program(*GRID, lambda: equal(64), long_side, mode=AUTO, told=False),
    "untold_swapped": Program(*GRID, lambda: equal(64), last_two("tensor", "fsdp"), mode=AUTO, told=False),
    "told_swapped": Program(*GRID, lambda: equal(64), last_two("tensor", "fsdp"), mode=AUTO),
    "untold_joint": Program(*GRID, lambda: equal(64), last_two(("fsdp", "tensor"), None), mode=AUTO, told=False),
    "untold_replicated": Program(*GRID, lambda: equal(64), last_two(None, None), mode=AUTO, told=False),
}  # fmt: skip


def ours(specs: dict | None) -> optax.GradientTransformation:
    return optax_muon.muon(
        1e-3, rules=[optax_muon.Rule(".*", optax_muon.MatrixView(-2, -1))], param_specs=specs
    )


def peer(shapes: dict) -> optax.GradientTransformation:
    numbers = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
    return optax.contrib.muon(1e-3, muon_weight_dimension_numbers=dict.fromkeys(shapes, numbers))


def measure(name: str, program: Program, optimizer: str) -> dict:
    mesh = tpu_topology.mesh(program.topology, program.mesh, program.names, program.mode)
    shapes = program.tree()
    places = {leaf: NamedSharding(mesh, program.spec(shape)) for leaf, shape in shapes.items()}
    params = {
        leaf: jax.ShapeDtypeStruct(shape, jnp.dtype(program.dtype), sharding=places[leaf])
        for leaf, shape in shapes.items()
    }
    tell = program.told and program.mode == AUTO
    tx = peer(shapes) if optimizer == "optax.contrib.muon" else ours(places if tell else None)
    state = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        jax.eval_shape(tx.init, params),
        optax_muon.state_shardings(tx, params),
    )
    start, cpu = time.perf_counter(), time.process_time()
    with tpu_topology.quiet() as said:
        compiled = jax.jit(tx.update).lower(params, state, params).compile()
    seconds = time.perf_counter() - start, time.process_time() - cpu
    got = tpu_topology.read(compiled, said())
    bound = sum(2 * 2 * math.prod(shape) for shape in shapes.values()) / mesh.size
    return {
        "benchmark": "collectives",
        "program": name,
        "optimizer": optimizer,
        "topology": program.topology,
        "mesh": dict(zip(program.names, program.mesh, strict=True)),
        "mode": program.mode.name,
        "specs_told": tell,
        "collectives": got.by_kind(),
        "moved_MiB": round(got.moved / 2**20, 1),
        "over_bound": round(got.moved / bound, 3),
        "inside_loops": sorted({c.kind for c in got.collectives if c.depth}),
        "temporaries_MiB": round(got.temporaries / 2**20),
        "arguments_MiB": round(got.arguments / 2**20),
        "gflop_in_program_text": round(got.flops / 1e9),
        "optimal_seconds": got.optimal_seconds,
        "trace_and_compile_s": round(seconds[0], 1),
        "trace_and_compile_processor_s": round(seconds[1], 1),
        "rematerialization_warning": "rematerialization" in got.warnings,
        "libtpu": version("libtpu"),
    }


def time_on_cpu(rounds: int, count: int, shape: tuple[int, ...]) -> list[dict]:
    """Seconds of one update: 8 devices that share the cores, and one."""
    values = {f"w{i}": np.random.default_rng(i).normal(size=shape).astype(np.float32) for i in range(count)}
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AUTO, AUTO))
    place = NamedSharding(mesh, P("fsdp", "tensor"))
    runs, rows = {}, {}
    for optimizer in ("optax_muon", "optax.contrib.muon"):
        for devices in (1, 8):
            where = place if devices == 8 else jax.devices()[0]
            params = jax.device_put({"a": values}, where)["a"]
            tx = ours(dict.fromkeys(values, place) if devices == 8 else None)
            tx = peer(values) if optimizer == "optax.contrib.muon" else tx
            state = tx.init(params)
            compiled = jax.jit(tx.update).lower(params, state, params).compile()
            key = f"{optimizer} on {devices}"
            got = tpu_topology.Program(tuple(tpu_topology.collectives(compiled.as_text())), 0, 0, 0, "", 0)
            rows[key] = {"benchmark": "collectives_cpu", "optimizer": optimizer, "devices": devices}
            rows[key] |= {"tree": f"{count} x {shape}", "collectives": got.by_kind()}
            runs[key] = lambda c=compiled, p=params, s=state: jax.block_until_ready(c(p, s, p))
    for key, seconds in record.interleaved(runs, rounds).items():
        rows[key] |= seconds
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--without-peer", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="also time one update on 8 CPU devices and on one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--matrices", nargs=3, type=int, default=[16, 512, 1024], help="for --cpu: count, sides"
    )
    arguments = parser.parse_args()
    if arguments.only and not tpu_topology.HAVE_LIBTPU:
        raise SystemExit("libtpu is not installed: pip install libtpu (Linux on x86-64; no TPU needed).")
    for name in arguments.only:
        program = PROGRAMS[name]
        peers = ["optax.contrib.muon"] if program.peer and not arguments.without_peer else []
        for optimizer in ("optax_muon", *peers):
            record.write("collectives", [measure(name, program, optimizer)])
    if arguments.cpu:
        record.write(
            "collectives", time_on_cpu(arguments.rounds, arguments.matrices[0], tuple(arguments.matrices[1:]))
        )


if __name__ == "__main__":
    main()
