"""Data parallelism with pmap: every replica holds the parameters, the matrices are divided among them.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/train_pmap.py

With `pmap_axis_name=` each replica orthogonalizes its share of the matrices and one all-gather brings the
updates back; without it every replica does all the work. The result is the same.
"""

from __future__ import annotations

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import optax_muon

AXIS = "replicas"
SIZES = {"hidden_0": (64, 128), "hidden_1": (128, 128), "hidden_2": (128, 128), "head": (128, 10)}


def init(seed: int) -> dict:
    """A multilayer perceptron as a dict of arrays."""
    keys = jax.random.split(jax.random.key(seed), len(SIZES))
    return {
        name: {"kernel": jax.random.normal(key, size) * size[0] ** -0.5, "bias": jnp.zeros(size[1])}
        for key, (name, size) in zip(keys, SIZES.items(), strict=True)
    }


def loss_fn(params: dict, images: jax.Array, labels: jax.Array) -> jax.Array:
    x = images
    for name in SIZES:
        x = x @ params[name]["kernel"] + params[name]["bias"]
        x = x if name == "head" else jax.nn.relu(x)
    return optax.softmax_cross_entropy_with_integer_labels(x, labels).mean()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=32, help="images per replica and step")
    arguments = parser.parse_args()
    replicas = jax.local_device_count()
    images, labels = load_digits(return_X_y=True)
    images = images.astype(np.float32) / 16

    optimizer = optax_muon.muon(3e-3, pmap_axis_name=AXIS)

    @functools.partial(jax.pmap, axis_name=AXIS, donate_argnums=(0, 1))
    def train_step(params, state, images, labels):
        loss, gradients = jax.value_and_grad(loss_fn)(params, images, labels)
        loss, gradients = jax.lax.pmean((loss, gradients), AXIS)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = init(0)
    print(optax_muon.describe(params))
    everywhere = lambda tree: jax.tree.map(lambda x: jnp.stack([x] * replicas), tree)
    params, state = everywhere(params), everywhere(optimizer.init(params))
    generator = np.random.default_rng(0)
    for step in range(arguments.steps):
        chosen = generator.integers(len(images), size=(replicas, arguments.batch))
        params, state, loss = train_step(params, state, images[chosen], labels[chosen])
        if step % 20 == 0 or step == arguments.steps - 1:
            print(f"step {step:4} on {replicas} replicas: loss {loss[0]:.4f}")


if __name__ == "__main__":
    main()
