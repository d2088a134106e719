"""A small GPT in Flax NNX: rotary positions, RMSNorm, squared ReLU, no biases, untied head.

Nothing in this file knows which optimizer will train it. Every hidden matrix is an `nnx.Linear`, so that the
default rules of optax_muon see its fan-in and fan-out without help.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx


@dataclasses.dataclass(frozen=True)
class Config:
    """The defaults have 1.77 million hidden parameters beside 0.1 million in the embedding and the head."""

    vocab: int = 256
    layers: int = 4
    width: int = 192
    heads: int = 3
    context: int = 128
    # On an Explicit mesh: how the residual stream [batch, time, width] is laid out, for example P("data").
    residual: jax.sharding.PartitionSpec | None = None


def rotate(x: jax.Array) -> jax.Array:
    """Rotary position embedding of [batch, time, heads, features]."""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def causal_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Softmax attention over [batch, time, heads, features], each position seeing itself and the past."""
    time, features = query.shape[1], query.shape[-1]
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) * features**-0.5
    visible = jnp.arange(time)[:, None] >= jnp.arange(time)
    weights = jax.nn.softmax(jnp.where(visible, logits, -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


class Attention(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        def linear(init):
            return nnx.Linear(config.width, config.width, use_bias=False, kernel_init=init, rngs=rngs)

        self.heads, self.residual = config.heads, config.residual
        self.query, self.key, self.value = (linear(nnx.initializers.lecun_normal()) for _ in range(3))
        self.out = linear(residual_init(config))

    def __call__(self, x: jax.Array) -> jax.Array:
        split = (*x.shape[:-1], self.heads, x.shape[-1] // self.heads)
        query, key, value = (part(x).reshape(split) for part in (self.query, self.key, self.value))
        return self.out(causal_attention(rotate(query), rotate(key), value).reshape(x.shape), self.residual)


class SquaredReLU(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.residual = config.residual
        self.up = nnx.Linear(config.width, 4 * config.width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(
            4 * config.width, config.width, use_bias=False, kernel_init=residual_init(config), rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jnp.square(nnx.relu(self.up(x))), self.residual)


class Block(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.mlp = SquaredReLU(config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.residual = config.residual
        self.embedding = nnx.Embed(config.vocab, config.width, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.head = nnx.Linear(config.width, config.vocab, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """[batch, time] of token numbers -> [batch, time, vocab] of logits."""
        x = self.embedding(tokens, self.residual)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def residual_init(config: Config):
    """Both maps that add to the residual stream of a block start smaller, as in GPT-2."""
    return nnx.initializers.variance_scaling(1 / (2 * config.layers), "fan_in", "truncated_normal")
