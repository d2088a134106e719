"""A multilayer perceptron in Equinox on the digits of scikit-learn.

    python examples/train_mlp_equinox.py                    # Muon, then AdamW at the same learning rate

`eqx.nn.MLP` does not say which of its layers is the output, so one rule does. The weights of an Equinox
`Linear` are (out, in), which the default rules know.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time

import equinox as eqx
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits
from tqdm import tqdm

import optax_muon
from optax_muon import Rule

DEPTH = 3
HEAD = Rule(f"layers/{DEPTH}/weight", None, because="the output layer of the MLP")


def digits(seed: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """1,797 images of 64 pixels; a random fifth is held out."""
    images, labels = load_digits(return_X_y=True)
    images = images.astype(np.float32) / 16
    order = np.random.default_rng(seed).permutation(len(images))
    train, test = order[len(order) // 5 :], order[: len(order) // 5]
    return (images[train], labels[train]), (images[test], labels[test])


def loss_fn(model: eqx.nn.MLP, images: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(images), labels).mean()


@eqx.filter_jit
def accuracy(model: eqx.nn.MLP, images: jax.Array, labels: jax.Array) -> jax.Array:
    return (jax.vmap(model)(images).argmax(-1) == labels).mean()


def train(transformation: optax.GradientTransformation, steps: int, batch: int, seed: int, name: str) -> dict:
    (images, labels), (test_images, test_labels) = digits(seed)
    model = make_model(seed)
    state = transformation.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def train_step(model, state, images, labels):
        loss, gradients = eqx.filter_value_and_grad(loss_fn)(model, images, labels)
        updates, state = transformation.update(gradients, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, loss

    generator, losses, start = np.random.default_rng(seed), [], time.perf_counter()
    for _ in tqdm(range(steps), desc=name):
        chosen = generator.integers(len(images), size=batch)
        model, state, loss = train_step(model, state, images[chosen], labels[chosen])
        losses.append(float(loss))
    return {
        "first_loss": float(np.mean(losses[:5])),
        "final_loss": float(np.mean(losses[-5:])),
        "accuracy": float(accuracy(model, test_images, test_labels)),
        "seconds": time.perf_counter() - start,
    }


def make_model(seed: int) -> eqx.nn.MLP:
    return eqx.nn.MLP(64, 10, width_size=256, depth=DEPTH, key=jax.random.key(seed))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, help="folder for a JSON record")
    arguments = parser.parse_args()

    params = eqx.filter(make_model(arguments.seed), eqx.is_inexact_array)
    print(optax_muon.describe(params, rules=[HEAD]))
    schedule = optax.cosine_decay_schedule(arguments.learning_rate, arguments.steps)
    transformations = {
        "muon": optax_muon.muon(schedule, rules=[HEAD]),
        "adamw": optax.adamw(schedule, weight_decay=0.1),
    }
    runs = {}
    for name, transformation in transformations.items():
        run = train(transformation, arguments.steps, arguments.batch, arguments.seed, name)
        runs[name] = run
    for name, run in runs.items():
        print(f"{name:6} training loss {run['final_loss']:.4f}, held-out accuracy {run['accuracy']:.3f}")
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "train_mlp_equinox.json").write_text(json.dumps(runs, indent=1))


if __name__ == "__main__":
    main()
