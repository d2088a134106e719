"""A small convolutional network in Flax Linen, with BatchNorm and TrainState, on the digits of scikit-learn.

python examples/train_cnn_linen.py                      # Muon, then AdamW at the same learning rate
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state
from sklearn.datasets import load_digits
from tqdm import tqdm

import optax_muon


class CNN(nn.Module):
    """Convolutions and the hidden Dense layer get Muon; BatchNorm, biases and the head get AdamW."""

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        x = images
        for features in (32, 64):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(128)(x.reshape(len(x), -1)))
        return nn.Dense(10, name="head")(x)


class TrainState(train_state.TrainState):
    batch_stats: Any


def digits(seed: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """1,797 images of 8x8 pixels; a random fifth is held out."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype(np.float32) / 16
    order = np.random.default_rng(seed).permutation(len(images))
    train, test = order[len(order) // 5 :], order[: len(order) // 5]
    return (images[train], labels[train]), (images[test], labels[test])


@jax.jit
def train_step(state: TrainState, images: jax.Array, labels: jax.Array) -> tuple[TrainState, jax.Array]:
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, changed = state.apply_fn(variables, images, train=True, mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, changed["batch_stats"]

    (loss, batch_stats), gradients = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=gradients, batch_stats=batch_stats), loss


@jax.jit
def accuracy(state: TrainState, images: jax.Array, labels: jax.Array) -> jax.Array:
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    return (state.apply_fn(variables, images, train=False).argmax(-1) == labels).mean()


def train(transformation: optax.GradientTransformation, steps: int, batch: int, seed: int, name: str) -> dict:
    (images, labels), (test_images, test_labels) = digits(seed)
    model = CNN()
    variables = model.init(jax.random.key(seed), images[:1], train=False)
    state = TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=transformation,
    )
    generator, losses, start = np.random.default_rng(seed), [], time.perf_counter()
    for _ in tqdm(range(steps), desc=name):
        chosen = generator.integers(len(images), size=batch)
        state, loss = train_step(state, images[chosen], labels[chosen])
        losses.append(float(loss))
    return {
        "first_loss": float(np.mean(losses[:5])),
        "final_loss": float(np.mean(losses[-5:])),
        "accuracy": float(accuracy(state, jnp.asarray(test_images), jnp.asarray(test_labels))),
        "seconds": time.perf_counter() - start,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, help="folder for a JSON record")
    arguments = parser.parse_args()

    params = CNN().init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)), train=False)["params"]
    print(optax_muon.describe(params))
    schedule = optax.cosine_decay_schedule(arguments.learning_rate, arguments.steps)
    transformations = {"muon": optax_muon.muon(schedule), "adamw": optax.adamw(schedule, weight_decay=0.1)}
    runs = {}
    for name, transformation in transformations.items():
        run = train(transformation, arguments.steps, arguments.batch, arguments.seed, name)
        runs[name] = run
    for name, run in runs.items():
        print(f"{name:6} training loss {run['final_loss']:.4f}, held-out accuracy {run['accuracy']:.3f}")
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "train_cnn_linen.json").write_text(json.dumps(runs, indent=1))


if __name__ == "__main__":
    main()
