"""The optimizer's share of a train step of the example GPT at its default batch: Muon, AdamW, optax.contrib.muon."""

import argparse
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import record
from flax import nnx

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))
import train_gpt
from gpt import GPT, Config

import optax_muon


def contrib_muon(learning_rate: Any = 1e-3, **options: Any) -> optax.GradientTransformation:
    """The peer with hand-written labels: Muon on the matrices that ours sends to Muon, Adam on the rest."""

    def numbers(params: Any) -> Any:
        both = {"muon": optax.contrib.MuonDimensionNumbers(0, 1), "adamw": None}
        return jax.tree.map(both.get, optax_muon.param_labels(params))

    return optax.contrib.muon(learning_rate, muon_weight_dimension_numbers=numbers, **options)


def candidates(sequences: int, config: Config) -> dict[str, Callable[[], Any]]:
    """Whole steps with each optimizer, and the update alone."""
    tokens = jnp.zeros((sequences, config.context + 1), jnp.int32)
    params = nnx.as_pure(nnx.state(GPT(config, nnx.Rngs(0)), nnx.Param))
    optimizers = {
        "muon": optax_muon.muon(1e-3),
        "adamw": optax.adamw(1e-3),
        "contrib": contrib_muon(),
        # Not optax.set_to_zero, for which the compiler would leave out the gradients.
        "without optimizer": optax.scale(-1e-9),
        "in the middle of a window": optax_muon.accumulate_gradients(optax_muon.muon(1e-3), 2**30),
    }
    out = {}
    for name, optimizer in optimizers.items():
        model = GPT(config, nnx.Rngs(0))
        holder = nnx.Optimizer(model, optimizer, wrt=nnx.Param)

        def step(model=model, holder=holder):
            jax.block_until_ready(train_gpt.train_step(model, holder, tokens))
            jax.block_until_ready(nnx.state(model))

        gradients = jax.tree.map(lambda p: jnp.full_like(p, 1e-3) + 1e-3 * p, params)
        state = optimizer.init(params)
        update = jax.jit(optimizer.update)

        def alone(update=update, gradients=gradients, state=state):
            jax.block_until_ready(update(gradients, state, params))

        out[f"step {name}"], out[f"update {name}"] = step, alone
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sequences", type=int, default=train_gpt.Settings().sequences)
    arguments = parser.parse_args()
    times = record.interleaved(candidates(arguments.sequences, Config()), arguments.rounds)
    median = {name: t["median_s"] for name, t in times.items()}
    rows = [{"benchmark": "step", "case": name, **t} for name, t in times.items()]
    rows.append(
        {
            "benchmark": "step",
            "case": "ratios",
            "sequences": arguments.sequences,
            "muon_step_over_adamw_step": median["step muon"] / median["step adamw"],
            "muon_share_of_step": median["update muon"] / median["step muon"],
            "middle_step_over_step_without_optimizer": (
                median["step in the middle of a window"] / median["step without optimizer"]
            ),
            "contrib_step_over_adamw_step": median["step contrib"] / median["step adamw"],
        }
    )
    record.write("step", rows)


if __name__ == "__main__":
    main()
