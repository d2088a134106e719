"""Training loops as people have them: NNX, Linen's TrainState, Equinox, Keras-like variables, trainers.

The trainers need much, so each has its test where it is installed and is skipped elsewhere. In an environment apart:

    python -m pip install -e . pytest flax equinox chex hypothesis beartype google-tunix
    python -m pytest tests/integrations/test_frameworks.py -k tunix

For `-k levanter` in place of google-tunix: "levanter>=1.2.dev0" gitpython jax==0.10.2 jaxlib==0.10.2. For
`-k maxtext`: maxtext, and for a CPU, of which it lists no requirements: orbax-checkpoint omegaconf pydantic qwix aqtp
transformers tiktoken sentencepiece cloud-tpu-diagnostics google-cloud-storage psutil ml-collections tokamax
pathwaysutils jinja2 grain drjax pillow sympy.
"""

import dataclasses
import importlib.util
import pathlib

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


def assert_muon_step(before, after, long_side, rate=RATE, spared=0):
    """Muon ran: a single step's singular values lie in Keller's band, but for the smallest ones that are spared."""
    change = (np.asarray(after, np.float64) - np.asarray(before, np.float64)).reshape(before.shape[0], -1)
    s = np.linalg.svd(change, compute_uv=False) / (rate * 0.2 * long_side**0.5)
    assert 0.6 < s[-1 - spared] <= s[0] < 1.25, s


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


def installed(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


# --- google-tunix, where it is installed (tried with 0.1.7, jax 0.12.0.1, flax 0.12.12, optax 0.2.8)


@installed("tunix")
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
        # Measured 0.68 to 1.18, dense and experts; the last one, of a gradient that is nearly singular, 0.06 and 0.58
        assert_muon_step(before, model.layers[0].attn.q_proj.w[...], 32, spared=1)
        trainer.close()


# --- Levanter: an OptimizerConfig of one's own (tried with 1.2.dev1644, haliax 1.4.dev453, equinox 0.13.8, jax 0.10.2;
# on jax 0.12 that haliax stops at jax.core.is_constant_dim)


@installed("levanter")
@pytest.mark.filterwarnings("ignore")
def test_levanter_trainer(tmp_path, monkeypatch):
    import draccus
    import haliax as hax
    import jmp
    from levanter.distributed import RayConfig
    from levanter.models.llama import LlamaConfig
    from levanter.models.lm_model import LmExample
    from levanter.optim import OptimizerConfig
    from levanter.tracker import NoopConfig
    from levanter.trainer import Trainer, TrainerConfig

    @OptimizerConfig.register_subclass("optax_muon")
    @dataclasses.dataclass(frozen=True)
    class Muon(OptimizerConfig):
        def build(self, num_train_steps):
            rate = self.lr_scheduler(num_train_steps)
            build = lambda learning_rate: muon(learning_rate, weight_decay=self.weight_decay)
            return optax.inject_hyperparams(build)(learning_rate=rate)

    def loss(model, example, *, key=None, **_):
        logits = model(example.tokens, example.attn_mask).rearrange(("batch", "position", "vocab")).array
        target = jnp.roll(example.tokens.array, -1, axis=1)
        return optax.softmax_cross_entropy_with_integer_labels(logits, target)[:, :-1].mean()

    monkeypatch.chdir(tmp_path)
    choice = {"type": "optax_muon", "learning_rate": RATE, "weight_decay": 0.0, "warmup": 0}
    optimizer = draccus.decode(OptimizerConfig, choice).build(6)
    config = TrainerConfig(
        tracker=NoopConfig(),
        train_batch_size=8,
        num_train_steps=6,
        mp=jmp.get_policy("f32"),
        require_accelerator=False,
        ray=RayConfig(auto_start_cluster=False),
    )
    config.initialize()
    model = LlamaConfig(
        seq_len=32, hidden_dim=32, intermediate_dim=64, num_layers=3, num_heads=4, num_kv_heads=2
    )
    tokens = np.random.default_rng(0).integers(0, 64, (8, 32)).astype(np.int32)
    example = hax.vmap(LmExample.causal, "batch")(hax.named(tokens, ("batch", "position")))
    weight = lambda state: np.asarray(state.model.transformer.layers.stacked.mlp.up_proj.weight.array)
    with Trainer(config, optimizer, loss) as trainer:
        state = trainer.initial_state(
            jax.random.PRNGKey(0),
            model_init=lambda: model.build(hax.Axis("vocab", 64), key=jax.random.key(0)),
        )
        labels = [row.label for row in optax_muon.describe(eqx.filter(state.model, eqx.is_array)).rows]
        assert labels.count("muon") == 7
        before, losses = weight(state), []
        for step in range(6):
            info = trainer.train_step(state, example)
            state = info.state
            losses.append(float(info.loss))
            if step == 0:
                for layer in range(3):
                    assert_muon_step(before[layer], weight(state)[layer], 64)
        assert losses[-1] < losses[0] - 1  # measured 4.64 and 3.13


# --- MaxText: get_optimizer in its place (tried with 0.2.5, jax 0.12.0.1, flax 0.12.12)


@installed("maxtext")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unscanned"])
def test_maxtext_trains(scan, tmp_path, monkeypatch):
    import maxtext
    from maxtext.optimizers import optimizers
    from maxtext.trainers.pre_train import train

    chosen = {}

    def get_optimizer(config, learning_rate_schedule, model=None, mesh=None):
        chosen["labels"] = optax_muon.param_labels(nnx.state(model, nnx.Param))
        return muon(learning_rate_schedule, weight_decay=config.adam_weight_decay)

    losses = []
    monkeypatch.setattr(optimizers, "get_optimizer", get_optimizer)
    loop = train.train_step

    def train_step(*arguments, **named):
        state, metrics = loop(*arguments, **named)
        jax.debug.callback(lambda x: losses.append(float(x)), metrics["scalar"]["learning/loss"])
        return state, metrics

    monkeypatch.setattr(train, "train_step", train_step)
    base = pathlib.Path(maxtext.__file__).parent / "configs" / "base.yml"
    sizes = (
        "base_emb_dim=32 base_num_query_heads=4 base_num_kv_heads=2 base_mlp_dim=48 head_dim=8 vocab_size=64"
    )
    sizes += (
        " base_num_decoder_layers=3 max_target_length=16 per_device_batch_size=1 steps=4 learning_rate=1e-2"
    )
    mesh = "ici_fsdp_parallelism=4 ici_tensor_parallelism=2 hardware=cpu skip_jax_distributed_system=True"
    rest = (
        "dataset_type=synthetic enable_checkpointing=False attention=dot_product dtype=float32 run_name=toy"
    )
    rest += f" enable_tensorboard=False warmup_steps_fraction=0.0 scan_layers={scan}"
    arguments = f"{sizes} {mesh} {rest}".split()
    train.main(["train", str(base), *arguments, f"base_output_directory={tmp_path}"])
    labels = jax.tree.leaves(chosen["labels"])
    assert labels.count("muon") == (7 if scan else 21)
    assert len(losses) >= 4
    assert min(losses) < losses[0] - 0.5  # measured 4.5 and 3.3
