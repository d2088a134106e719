"""A small mixture-of-experts GPT in the style of Moonlight, in Flax NNX: latent attention, shared and routed experts.

Nothing in this file knows which optimizer will train it. The default rules of optax_muon see every expert as a
matrix of its own, because the experts lie in one array (experts, in, out) under the name `experts`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from gpt import causal_attention, rotate

from optax_muon import max_attention_logits


@dataclasses.dataclass(frozen=True)
class Config:
    """The defaults have 1.4 million hidden parameters, of which a token uses a third."""

    vocab: int = 256
    layers: int = 3
    width: int = 128
    heads: int = 4
    nope: int = 16
    rope: int = 16
    value: int = 32
    rank: int = 48
    experts: int = 8
    active: int = 2
    expert_width: int = 96
    context: int = 128


class MaxLogits(nnx.Variable):
    """[heads]: the largest attention logit of each head in the last forward pass, which QK-clip reads."""


class LatentAttention(nnx.Module):
    """MLA: keys and values come from a latent of few dimensions; one rotary key is shared by all heads."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        def linear(fan_in, fan_out):
            return nnx.Linear(fan_in, fan_out, use_bias=False, rngs=rngs)

        self.config = config
        self.q_proj = linear(config.width, config.heads * (config.nope + config.rope))
        self.kv_down = linear(config.width, config.rank + config.rope)
        self.latent_norm = nnx.RMSNorm(config.rank, rngs=rngs)
        self.kv_up = linear(config.rank, config.heads * (config.nope + config.value))
        self.out = linear(config.heads * config.value, config.width)
        self.max_logits = MaxLogits(jnp.zeros(config.heads))

    def __call__(self, x: jax.Array) -> jax.Array:
        c, batch = self.config, x.shape[:-1]
        query = self.q_proj(x).reshape(*batch, c.heads, c.nope + c.rope)
        latent, rotary = jnp.split(self.kv_down(x), [c.rank], axis=-1)
        key_value = self.kv_up(self.latent_norm(latent)).reshape(*batch, c.heads, c.nope + c.value)
        key, value = jnp.split(key_value, [c.nope], axis=-1)
        rotary = jnp.broadcast_to(rotate(rotary[..., None, :]), (*batch, c.heads, c.rope))
        key = jnp.concatenate([key, rotary], axis=-1)
        query = jnp.concatenate([query[..., : c.nope], rotate(query[..., c.nope :])], axis=-1)
        self.max_logits[...] = max_attention_logits(query, key, causal=True)
        return self.out(causal_attention(query, key, value).reshape(*batch, -1))


class Experts(nnx.Module):
    """SwiGLU experts in one array each for gate, up and down."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal(batch_axis=0)
        wide = (config.experts, config.width, config.expert_width)
        self.gate = nnx.Param(init(rngs.params(), wide))
        self.up = nnx.Param(init(rngs.params(), wide))
        self.down = nnx.Param(init(rngs.params(), (config.experts, config.expert_width, config.width)))

    def __call__(self, x: jax.Array, weights: jax.Array) -> jax.Array:
        # Every expert sees every token, and the weights of those not chosen are zero: simple, and fast at this size.
        gate, up = (jnp.einsum("btd,edf->betf", x, w[...]) for w in (self.gate, self.up))
        return jnp.einsum("betf,efd,bte->btd", jax.nn.silu(gate) * up, self.down[...], weights)


class MixtureOfExperts(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.active = config.active
        self.router = nnx.Linear(config.width, config.experts, use_bias=False, rngs=rngs)
        self.experts = Experts(config, rngs)
        self.shared = SwiGLU(config.width, config.expert_width, rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The output, and the balance loss: 1 where all experts are chosen equally often."""
        scores = jax.nn.softmax(self.router(x))
        best, chosen = jax.lax.top_k(scores, self.active)
        mask = jax.nn.one_hot(chosen, scores.shape[-1]).sum(-2)
        weights = mask * scores / best.sum(-1, keepdims=True)
        share, score = mask.mean((0, 1)) / self.active, scores.mean((0, 1))
        return self.experts(x, weights) + self.shared(x), scores.shape[-1] * jnp.sum(share * score)


class SwiGLU(nnx.Module):
    def __init__(self, width: int, hidden: int, rngs: nnx.Rngs):
        self.gate, self.up = (nnx.Linear(width, hidden, use_bias=False, rngs=rngs) for _ in range(2))
        self.down = nnx.Linear(hidden, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.attention = LatentAttention(config, rngs)
        self.mlp_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.mlp = MixtureOfExperts(config, rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = x + self.attention(self.attention_norm(x))
        y, balance = self.mlp(self.mlp_norm(x))
        return x + y, balance


class MoE(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(config.vocab, config.width, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.head = nnx.Linear(config.width, config.vocab, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[batch, time] of token numbers -> logits [batch, time, vocab] and the mean balance loss."""
        x, balance = self.embedding(tokens), 0.0
        for block in self.blocks:
            x, one = block(x)
            balance = balance + one / len(self.blocks)
        return self.head(self.norm(x)), balance
