"""One optimizer update on the hidden matrices of known models: time, arithmetic, temporaries, error; ours
beside its peers.

All candidates run in this process, in turn. `--processor-time` adds the seconds that all cores worked, which
a busy machine disturbs less than the clock. `--device gpu` (or tpu) stops at once where there is none; with
the default trees it needs less than four minutes on one GPU.

    python tests/benchmarks/bench_update.py --trees gpt2_small --rounds 7
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import record

import optax_muon
from optax_muon import Orthogonalizer

Shapes = list[tuple[int, tuple[int, ...]]]

# count and shape of the leaves. A leaf of rank 3 is a stack of matrices; optax.contrib.muon is told so by its
# dimension numbers.
TREES: dict[str, Shapes] = {
    "gpt2_small": [(48, (768, 768)), (12, (768, 3072)), (12, (3072, 768))],
    # One of the 22 layers of TinyLlama-1.1B: q and o, k and v, gate and up, down. The matrices of a shape are
    # worked on one after the other, so that more layers take as many times as long.
    "llama_1b_layer": [(2, (2048, 2048)), (2, (2048, 256)), (2, (2048, 5632)), (1, (5632, 2048))],
    # 8 of the 64 experts of one layer of Moonlight-16B, of width 1408: gate, up, down.
    "moe_8_of_64": [(2, (8, 2048, 1408)), (1, (8, 1408, 2048))],
    "small_168": [(56, (64, 64)), (56, (64, 256)), (56, (256, 64))],
    "lora": [(96, (768, 16)), (96, (16, 768))],
    "toy": [(3, (16, 16)), (2, (16, 64)), (1, (2, 16, 32))],
}


def leaves(tree: str) -> dict[str, tuple[int, ...]]:
    return {f"leaf_{i}_{j}": shape for i, (count, shape) in enumerate(TREES[tree]) for j in range(count)}


def views(params: dict) -> list[optax_muon.Rule]:
    return [optax_muon.Rule(f"{name}/kernel", optax_muon.MatrixView(-2, -1)) for name in params]


def ours(**options) -> Callable[[dict], optax.GradientTransformation]:
    return lambda params: optax_muon.muon(1e-3, rules=views(params), orthogonalizer=Orthogonalizer(**options))


def peer(params: dict) -> optax.GradientTransformation:
    numbers = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
    return optax.contrib.muon(1e-3, muon_weight_dimension_numbers=jax.tree.map(lambda _: numbers, params))


CANDIDATES: dict[str, Callable[[dict], optax.GradientTransformation]] = {
    "optax.contrib.muon": peer,
    "optax_muon": ours(),
    "optax_muon newton_schulz": ours(method="newton_schulz"),
    "optax_muon gram_newton_schulz": ours(method="gram_newton_schulz"),
    "optax_muon bfloat16": ours(compute_dtype="bfloat16"),
    "optax.adamw": lambda params: optax.adamw(1e-3),
}


def structure(tree: str) -> dict:
    """The tree's structure, for what looks at paths alone."""
    return {name: {"kernel": None} for name in leaves(tree)}


def gaussian_tree(tree: str) -> dict:
    key = jax.random.key(0)
    return {
        name: {"kernel": jax.random.normal(jax.random.fold_in(key, i), shape)}
        for i, (name, shape) in enumerate(leaves(tree).items())
    }


def polar_error(update: jax.Array, gradient: jax.Array) -> float:
    """Root mean square singular value of the difference to the exact scalar map, the update's own scale
    removed.
    """
    g = np.asarray(gradient, np.float64).reshape(-1, *gradient.shape[-2:])[0]
    u = np.asarray(update, np.float64).reshape(-1, *update.shape[-2:])[0]
    left, s, right = np.linalg.svd(g, full_matrices=False)
    s = s / np.linalg.norm(s)
    for a, b, c in optax_muon.KELLER:
        s = a * s + b * s**3 + c * s**5
    exact = left * s @ right
    u = -u * (np.sum(-u * exact) / np.sum(u * u))
    return float(np.linalg.norm(u - exact) / np.sqrt(len(s)))


def measure(tree: str, names: list[str], rounds: int, processor_time: bool) -> list[dict]:
    params = gaussian_tree(tree)
    zeros = jax.tree.map(
        jnp.zeros_like, params
    )  # no decay, so that the update is the orthogonalised gradient
    rows, runs = {}, {}
    for name in names:
        optimizer = CANDIDATES[name](params)
        state = jax.jit(optimizer.init)(zeros)
        start = time.perf_counter()
        update = jax.jit(lambda g, s, p, o=optimizer: o.update(g, s, p)).lower(params, state, zeros).compile()
        rows[name] = {
            "benchmark": "update",
            "tree": tree,
            "optimizer": name,
            "trace_and_compile_s": time.perf_counter() - start,
        }
        memory, cost = update.memory_analysis(), update.cost_analysis()
        rows[name]["temporaries_MiB"] = memory.temp_size_in_bytes / 2**20
        # Counted once where the program loops over matrices.
        rows[name]["gflop_in_program_text"] = cost.get("flops", float("nan")) / 1e9
        runs[name] = lambda update=update, state=state: jax.block_until_ready(update(params, state, zeros))
        first = next(iter(params))
        if "adamw" not in name and min(params[first]["kernel"].shape[-2:]) <= 1024:
            rows[name]["polar_error"] = polar_error(runs[name]()[0][first]["kernel"], params[first]["kernel"])
    if processor_time:
        worked: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(rounds + 1):
            for name in names:
                start = time.process_time()
                runs[name]()
                worked[name].append(time.process_time() - start)
        for name in names:
            rows[name]["processor_median_s"] = statistics.median(worked[name][1:])
    for name, seconds in record.interleaved(runs, rounds).items():
        rows[name].update(seconds)
    for clock in ("median_s", "processor_median_s"):
        base = rows.get("optax.contrib.muon", {}).get(clock)
        for row in rows.values():
            if base and clock in row:
                row[f"{clock.removesuffix('_s')}_over_optax_contrib"] = row[clock] / base
    return list(rows.values())


def peak_gflops(size: int) -> dict[str, float]:
    """What a square product of this side reaches here, in the dtypes that the candidates multiply in."""
    peak = {}
    for dtype in (jnp.float32, jnp.bfloat16):
        x = jnp.ones((size, size), dtype)
        dot = jax.jit(
            lambda x: jax.lax.dot(
                x, x, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
            )
        )
        times = record.interleaved({"dot": lambda dot=dot, x=x: dot(x).block_until_ready()}, 9)["dot"]
        peak[jnp.dtype(dtype).name] = 2e-9 * size**3 / times["median_s"]
    return peak


def distance_from_peak(tree: str, rows: list[dict]) -> None:
    """Adds to our rows the arithmetic of the products, and its speed over that of a square product of the side
    of the tree's first matrix.
    """
    side = max(256, min(TREES[tree][0][1][-2:]))  # what a smaller product takes is mostly its start
    peak = peak_gflops(side)
    for row in rows:
        config = getattr(CANDIDATES[row["optimizer"]](structure(tree)), "config", None)
        if config is None:
            continue
        orthogonalizer = config.orthogonalizer
        gflop = 1e-9 * sum(
            math.prod(shape[:-2]) * orthogonalizer.flops(*shape[-2:]) for shape in leaves(tree).values()
        )
        dtype = orthogonalizer.matmul_dtype(jnp.float32).name
        row |= {"products_gflop": gflop, "square_product": f"{side}, {dtype}", "square_gflops": peak[dtype]}
        row["share_of_square_product"] = gflop / row["median_s"] / peak[dtype]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trees", nargs="+", default=["gpt2_small", "small_168", "lora"])
    parser.add_argument("--candidates", nargs="+", default=None, help="names of candidates; by default all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=["cpu", "gpu", "tpu"])
    parser.add_argument("--processor-time", action="store_true")
    options = parser.parse_args()
    jax.config.update("jax_platforms", {"gpu": "cuda"}.get(options.device, options.device))
    unknown = [tree for tree in options.trees if tree not in TREES]
    if unknown:
        sys.exit(f"Unknown trees {unknown}; there are {', '.join(TREES)}.")
    if jax.default_backend() != options.device:
        sys.exit(f"--device {options.device}, but jax found {jax.default_backend()} only.")
    names = options.candidates or list(CANDIDATES)
    rows = []
    for tree in options.trees:
        measured = measure(tree, names, options.rounds, options.processor_time)
        distance_from_peak(tree, measured)
        rows += measured
    record.write("update", rows)


if __name__ == "__main__":
    main()
