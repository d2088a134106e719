"""Seconds to trace and compile one update, ours and optax.contrib.muon's, and how ours grows with depth."""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
import record

import optax_muon


def small_matrices(count: int) -> dict:
    """`count` matrices of three shapes, as in a small transformer whose layers are separate leaves."""
    shapes = ((64, 64), (64, 256), (256, 64))
    return {f"layer_{i}": {"kernel": jax.ShapeDtypeStruct(shapes[i % 3], jnp.float32)} for i in range(count)}


def gpt2_small(layers: int) -> dict:
    """The hidden matrices of GPT-2 small with `layers` layers, each a leaf."""
    shapes = {"q": (768, 768), "k": (768, 768), "v": (768, 768), "o": (768, 768), "up": (768, 3072)}
    shapes["down"] = (3072, 768)
    return {
        f"layer_{i}": {
            name: {"kernel": jax.ShapeDtypeStruct(shape, jnp.float32)} for name, shape in shapes.items()
        }
        for i in range(layers)
    }


OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "optax_muon": lambda: optax_muon.muon(1e-3),
    "optax.contrib.muon": lambda: optax.contrib.muon(1e-3),
}


def compile_seconds(make: Callable[[], optax.GradientTransformation], params: dict) -> float:
    jax.clear_caches()
    optimizer = make()
    state = jax.eval_shape(optimizer.init, params)
    start = time.perf_counter()
    jax.jit(lambda g, s, p: optimizer.update(g, s, p)).lower(params, state, params).compile()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", type=int, default=168, help="number of small matrices")
    parser.add_argument(
        "--layers", type=int, nargs=2, default=(12, 48), help="depths of GPT-2 small to compare"
    )
    arguments = parser.parse_args()
    rounds, (shallow, deep) = arguments.rounds, arguments.layers
    small = f"{arguments.small} small matrices"
    named = {depth: f"GPT-2 small, {depth} layers" for depth in (shallow, deep)}
    cases = {small: (small_matrices(arguments.small), tuple(OPTIMIZERS))}
    cases |= {name: (gpt2_small(depth), ("optax_muon",)) for depth, name in named.items()}
    seconds: dict[tuple[str, str], list[float]] = {}
    for i in range(rounds + 1):  # the first round warms imports and is not counted
        for case, (params, names) in cases.items():
            for name in names:
                taken = compile_seconds(OPTIMIZERS[name], params)
                if i:
                    seconds.setdefault((case, name), []).append(taken)
    median = {key: statistics.median(s) for key, s in seconds.items()}
    rows = [
        {"benchmark": "compile", "case": case, "optimizer": name, "median_s": median[case, name], "n": rounds}
        for case, name in seconds
    ]
    ours, peer = (median[small, name] for name in OPTIMIZERS)
    growth = median[named[deep], "optax_muon"] / median[named[shallow], "optax_muon"]
    rows.append(
        {"benchmark": "compile", "case": "ratios", "ours_over_peer": ours / peer, "deep_over_shallow": growth}
    )
    record.write("compile", rows)


if __name__ == "__main__":
    main()
