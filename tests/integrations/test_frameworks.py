"""Training loops as people have them: NNX, Linen's TrainState, Equinox, Keras-like variables, Tunix."""

import dataclasses
import importlib.util

import chex
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType

import optax_muon
from optax_muon import muon

RATE = 1e-2


def normal(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def assert_muon_step(before, after, long_side, rate=RATE):
    """Muon ran: a single step's singular values lie in Keller's band."""
    change = (np.asarray(after, np.float64) - np.asarray(before, np.float64)).reshape(before.shape[0], -1)
    s = np.linalg.svd(change, compute_uv=False) / (rate * 0.2 * long_side**0.5)
    assert 0.6 < s.min() <= s.max() < 1.25, s


# --- NNX


class Lora(nnx.Module):
    """A frozen base with a trainable low-rank pair, as PEFT does it."""

    def __init__(self, rngs):
        self.base = nnx.Linear(8, 8, rngs=rngs)
        self.lora = nnx.LoRA(8, 4, 8, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(jax.nn.gelu(self.base(x) + self.lora(x)))


def nnx_trainer(wrt, x, y):
    @nnx.jit
    def step(model, optimizer):
        loss = lambda m: jnp.mean((m(x) - y) ** 2)
        value, gradients = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, wrt))(model)
        optimizer.update(model, gradients)
        return value

    return step


@pytest.mark.parametrize("wrapped", ["plain", "chain", "inject"])
def test_nnx_optimizer(wrapped):  # flax #4901, #5372, #3955, optax #1148
    model = nnx.Sequential(
        nnx.Linear(8, 16, rngs=nnx.Rngs(0)),
        nnx.LayerNorm(16, rngs=nnx.Rngs(1)),
        nnx.Linear(16, 8, rngs=nnx.Rngs(2)),
    )
    tx = {
        "plain": lambda: muon(RATE, weight_decay=0.0),
        "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), muon(RATE, weight_decay=0.0)),
        "inject": lambda: optax.inject_hyperparams(muon)(RATE, weight_decay=0.0),
    }[wrapped]()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    before = np.asarray(model.layers[0].kernel[...])
    step = nnx_trainer(nnx.Param, normal((64, 8)), normal((64, 8), 1))
    losses = [float(step(model, optimizer))]
    assert_muon_step(before, model.layers[0].kernel[...], 16)
    losses += [float(step(model, optimizer)) for _ in range(4)]
    assert losses[-1] < losses[0]
    assert int(optimizer.step[...]) == 5


def test_nnx_filters_train_only_what_they_select():  # OneTrainer #1314
    model = Lora(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, muon(RATE, weight_decay=0.0), wrt=nnx.LoRAParam)
    frozen = np.asarray(model.base.kernel[...])
    a, b = (np.asarray(x[...]) for x in (model.lora.lora_a, model.lora.lora_b))
    step = nnx_trainer(nnx.LoRAParam, normal((16, 8)), normal((16, 3), 1))
    for _ in range(2):  # B starts at zero, so A has no gradient at first
        step(model, optimizer)
    np.testing.assert_array_equal(model.base.kernel[...], frozen)
    assert all(jnp.all(jnp.isfinite(x[...])) for x in (model.lora.lora_a, model.lora.lora_b))
    change = np.linalg.svd(np.asarray(model.lora.lora_b[...]) - b, compute_uv=False)
    assert change[3] > 0.4 * change[0]  # two steps that nearly agree: measured 0.65
    held = sum(x.size for x in jax.tree.leaves(nnx.state(optimizer, nnx.optimizer.OptState)))
    assert held < a.size + b.size + 16
    picked = nnx.All(nnx.Param, nnx.PathContains("base"))
    other = nnx.Optimizer(model, muon(RATE, weight_decay=0.0), wrt=picked)
    before = np.asarray(model.base.kernel[...])
    nnx_trainer(picked, normal((16, 8)), normal((16, 3), 1))(model, other)
    change = np.linalg.svd(np.asarray(model.base.kernel[...]) - before, compute_uv=False)
    assert change[2] > 0.4 * change[0]


def test_nnx_models_without_matrices():  # flax #4901
    model = nnx.LayerNorm(8, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, muon(RATE), wrt=nnx.Param)
    step = nnx_trainer(nnx.Param, normal((4, 8)), normal((4, 8), 1))
    for _ in range(2):
        step(model, optimizer)
    assert not np.allclose(model.scale[...], 1.0)


# --- Linen


def test_train_state():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8)(nn.relu(nn.Dense(16, name="hidden")(x)))

    net = Net()
    params = net.init(jax.random.key(0), jnp.ones((1, 8)))["params"]
    state = TrainState.create(apply_fn=net.apply, params=params, tx=muon(RATE, weight_decay=0.0))

    @jax.jit
    def step(state):
        loss = lambda p: jnp.mean((state.apply_fn({"params": p}, normal((64, 8))) - normal((64, 8), 1)) ** 2)
        value, gradients = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), value

    after, value = step(state)
    change = np.linalg.svd(after.params["hidden"]["kernel"] - params["hidden"]["kernel"], compute_uv=False)
    assert 0.6 < change[-1] / (RATE * 0.2 * 4) <= change[0] / (RATE * 0.2 * 4) < 1.25
    for _ in range(4):
        after, later = step(after)
    assert later < value
    chex.assert_trees_all_equal_shapes_and_dtypes(after.opt_state, state.opt_state)


# --- Equinox


def test_equinox_filter_jit():  # equinox #364, #681, #772
    model = eqx.nn.MLP(8, 8, 16, 2, key=jax.random.key(0))
    tx = muon(RATE, weight_decay=0.0)
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    x, y = normal((32, 8)), normal((32, 8), 1)

    @eqx.filter_jit
    def step(model, state):
        loss = lambda m: jnp.mean((jax.vmap(m)(x) - y) ** 2)
        value, gradients = eqx.filter_value_and_grad(loss)(model)
        updates, state = tx.update(gradients, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, value

    moved, state, value = step(model, state)
    change = np.asarray(moved.layers[1].weight - model.layers[1].weight, np.float64)
    s = np.linalg.svd(change, compute_uv=False) / (RATE * 0.2 * 4)
    assert 0.5 < np.median(s) < 1.25  # dead units leave small singular values
    for _ in range(4):
        moved, state, later = step(moved, state)
    assert later < value


# --- Keras on JAX: a list of variables that know their names


@dataclasses.dataclass
class Variable:
    path: str
    value: jax.Array


def test_a_list_of_named_variables():  # keras #21793, #21079
    variables = [
        Variable("embedding/embeddings", normal((32, 8))),
        Variable("dense/kernel", normal((8, 16), 1)),
        Variable("dense/bias", normal((16,), 2)),
        Variable("predictions/kernel", normal((16, 4), 3)),
    ]
    gradients = [normal(v.value.shape, 10 + i) for i, v in enumerate(variables)]
    tx = muon(RATE, weight_decay=0.0)
    named = {v.path: v.value for v in variables}
    state = tx.init(named)
    updates, _ = jax.jit(tx.update)(
        {v.path: g for v, g in zip(variables, gradients, strict=True)}, state, named
    )
    labels = optax_muon.param_labels(named)
    assert [path for path, label in labels.items() if label == "muon"] == ["dense/kernel"]
    assert_muon_step(np.zeros((8, 16)), updates["dense/kernel"], 16)
    # Without names, labels in a list do the same.
    values = [v.value for v in variables]
    bare = muon(RATE, weight_decay=0.0, param_labels=["adamw", "muon", "adamw", "adamw"])
    listed, _ = bare.update(gradients, bare.init(values), values)
    # measured 1.0e-8, eager against jit
    chex.assert_trees_all_close(listed, [updates[v.path] for v in variables], rtol=1e-4, atol=1e-6)


# --- google-tunix, where it is installed (tried with 0.1.7, jax 0.12.0.1, flax 0.12.12, optax 0.2.8)


@pytest.mark.skipif(importlib.util.find_spec("tunix") is None, reason="pip install google-tunix")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("experts", [None, 4], ids=["dense", "moe"])
def test_tunix_trainer_on_a_mesh(experts):
    from tunix.models.qwen3 import model as qwen3
    from tunix.sft import peft_trainer

    config = qwen3.ModelConfig(
        num_layers=2,
        vocab_size=64,
        embed_dim=32,
        hidden_dim=48,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        rope_theta=10_000,
        norm_eps=1e-6,
        num_experts=experts,
        num_experts_per_tok=experts and 2,
    )
    with jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2):

        @nnx.jit
        def create():
            model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
            state = nnx.state(model)
            nnx.update(model, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
            return model

        model = create()
        labels = jax.tree.leaves(optax_muon.param_labels(nnx.state(model, nnx.Param)))
        assert labels.count("muon") == (16 if experts else 14)
        before = np.asarray(model.layers[0].attn.q_proj.w[...])
        trainer = peft_trainer.PeftTrainer(
            model,
            muon(RATE, weight_decay=0.0),
            peft_trainer.TrainingConfig(eval_every_n_steps=100, max_steps=1),
        )
        tokens = np.random.default_rng(0).integers(0, 64, (4, 16)).astype(np.int32)
        trainer = trainer.with_gen_model_input_fn(
            lambda batch: {
                "input_tokens": batch.input_tokens,
                "input_mask": batch.input_mask,
                "positions": jnp.broadcast_to(jnp.arange(16), (4, 16)),
                "attention_mask": jnp.broadcast_to(jnp.tril(jnp.ones((16, 16), bool)), (4, 16, 16)),
            }
        )
        batch = peft_trainer.TrainingInput(input_tokens=tokens, input_mask=np.ones_like(tokens))
        trainer.train([batch], None)
        assert trainer.train_steps == 1
        assert_muon_step(
            before, model.layers[0].attn.q_proj.w[...], 32
        )  # seen in a script: .58 of nominal and up
        trainer.close()
