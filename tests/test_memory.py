"""estimate_memory against real arrays, against the compiler, and against what authors published."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_muon
from examples import gpt as example
from examples import published_models
from optax_muon import MemoryEstimate, _memory, accumulate_gradients, estimate_memory, muon, state_shardings

GIB = 2**30


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def linear(*shape):
    return {"kernel": struct(*shape)}


def gpt(d=768, layers=12):
    attention = lambda: {name: linear(d, d) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    block = lambda: {"attn": attention(), "mlp": {"up_proj": linear(d, 4 * d), "down_proj": linear(4 * d, d)}}
    return {f"block_{i}": block() for i in range(layers)}


def llama(d=2048, width=5632, layers=22):
    attention = {
        "q_proj": linear(layers, d, d),
        "k_proj": linear(layers, d, d // 8),
        "o_proj": linear(layers, d, d),
    }
    mlp = {"gate_proj": linear(layers, d, width), "down_proj": linear(layers, width, d)}
    return {"layers": {"attn": attention, "mlp": mlp, "norm": {"scale": struct(layers, d)}}}


def moe(d=512, width=1024, experts=64, layers=4):
    names = {"gate_proj": (d, width), "up_proj": (d, width), "down_proj": (width, d)}
    mlp = {"experts": {name: linear(layers, experts, *sides) for name, sides in names.items()}}
    return {"layers": {"attn": {"q_proj": linear(layers, d, d)}, "mlp": mlp}}


def small_matrices(count=168, d=64):
    return {f"layer_{i}": {"up_proj": linear(d, d if i % 2 else 4 * d)} for i in range(count)}


def lora(d=768, rank=16, layers=12):
    return {
        f"block_{i}": {"q_proj": {"lora_a": struct(d, rank), "lora_b": struct(rank, d)}}
        for i in range(layers)
    }


TREES = {"gpt": gpt, "llama": llama, "moe": moe, "small": small_matrices, "lora": lora}


def placed(tree, kind, sizes=(4, 2)):
    return published_models.place(tree, jax.make_mesh(sizes, ("data", "model"), axis_types=(kind,) * 2))


def compiled(optimizer, params):
    """The compiler's own account of an update with gradients and state donated."""
    state = jax.eval_shape(optimizer.init, params)
    if jax.tree.leaves(params)[0].sharding is not None:
        state = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            state,
            state_shardings(optimizer, params),
        )
    return (
        jax.jit(optimizer.update, donate_argnums=(0, 1))
        .lower(params, state, params)
        .compile()
        .memory_analysis()
    )


def close_to_the_compiler(optimizer, params, bound=0.1):
    estimate, account = estimate_memory(optimizer, params), compiled(optimizer, params)
    arguments = estimate.total.bytes - estimate.temporaries.bytes
    assert arguments == pytest.approx(account.argument_size_in_bytes, rel=1e-3, abs=4096)  # XLA rounds up
    fresh = account.output_size_in_bytes - account.alias_size_in_bytes
    total = account.argument_size_in_bytes + account.temp_size_in_bytes + fresh
    assert estimate.total.bytes == pytest.approx(total, rel=bound)
    return estimate.temporaries.bytes / max(account.temp_size_in_bytes, 1)


@pytest.mark.parametrize("name", TREES)
def test_agrees_with_the_compiler(name):
    params = TREES[name]()
    ratio = close_to_the_compiler(muon(1e-3), params)
    assert ratio == pytest.approx(1, abs=0.1)  # measured 1.000, 0.995, 1.008, 1.000, 1.000
    assert estimate_memory(muon(1e-3), params).optimizer_state.change == pytest.approx(-0.5, abs=0.01)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_agrees_with_the_compiler_on_a_mesh(kind):
    params = placed(llama(512, 1408, 6), kind)
    specs = jax.tree.map(lambda x: x.sharding, params)
    # measured -2 %; the worst tree tried is 12 % too low
    close_to_the_compiler(muon(1e-3, param_specs=specs), params)


@pytest.mark.parametrize(
    "make",
    [
        lambda: accumulate_gradients(muon(1e-3), 4),  # measured +3 %
        lambda: muon(1e-3, mu_dtype="int8"),  # measured +3 %; up to 12 % too low on other trees
        lambda: optax.adamw(1e-3),  # measured 0.0 %
    ],
    ids=["accumulate", "int8", "adamw"],
)
def test_agrees_with_the_compiler_for_other_optimizers(make):
    close_to_the_compiler(make(), moe(128, 256, 16, 2))


def test_the_example_gpt_by_the_compiler():
    """What the compiler itself says the state of Muon takes, against AdamW's, for the GPT of examples/."""
    config = example.Config()
    params = nnx.as_pure(nnx.eval_shape(lambda: nnx.state(example.GPT(config, nnx.Rngs(0)), nnx.Param)))
    hidden = sum(row.size for row in optax_muon.describe(params).rows if row.label == "muon")
    rest = sum(x.size for x in jax.tree.leaves(params)) - hidden
    state = {}
    for name, optimizer in {"muon": muon(1e-3), "adamw": optax.adamw(1e-3)}.items():
        close_to_the_compiler(optimizer, params)
        state[name] = compiled(optimizer, params).argument_size_in_bytes - 2 * 4 * (hidden + rest)
    assert hidden == 4 * 12 * config.width**2
    # One momentum for a hidden parameter and two moments for any other; measured 8 and 4 bytes more, of counters. The
    # norms are not decayed by `muon`, so that its update does not read them and the compiler drops the arguments.
    norms = (2 * config.layers + 1) * config.width
    assert state["muon"] == pytest.approx(4 * (hidden + 2 * rest) - 4 * norms, abs=64)
    assert state["adamw"] == pytest.approx(8 * (hidden + rest), abs=64)
    assert state["muon"] / state["adamw"] == pytest.approx(0.527, abs=1e-3)  # measured .527


def on_first_device(tree):
    device = jax.devices()[0]
    return sum(
        s.data.nbytes for x in jax.tree.leaves(tree) for s in x.addressable_shards if s.device == device
    )


OPTIMIZERS = {
    "muon": lambda: muon(1e-3),
    "bf16": lambda: muon(1e-3, mu_dtype=jnp.bfloat16),
    "int8": lambda: muon(1e-3, mu_dtype="int8"),
    "accumulate": lambda: accumulate_gradients(muon(1e-3), 2),
    "chain": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax_muon.muon(optax.constant_schedule(1e-3))
    ),
    "inject": lambda: optax.inject_hyperparams(muon)(1e-3),
    "adamw": lambda: optax.adamw(1e-3),
}
SMALL = {"layers": {"mlp": {"up_proj": linear(4, 64, 512)}}, "embed": {"embedding": struct(128, 64)}}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_exact(name):
    for params in (SMALL, placed(SMALL, AxisType.Explicit), placed(SMALL, AxisType.Auto)):
        arrays = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, device=s.sharding), params)
        optimizer = OPTIMIZERS[name]()
        estimate = estimate_memory(optimizer, params)
        assert estimate.parameters.bytes == estimate.gradients.bytes == on_first_device(arrays)
        assert estimate.optimizer_state.bytes == on_first_device(optimizer.init(arrays))
        assert estimate.optimizer_state.adamw_bytes == on_first_device(optax.adamw(1e-3).init(arrays))
        assert estimate == estimate_memory(optimizer, arrays)


def test_state_cut_further():
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P(None, "model"))),
        SMALL,
    )
    arrays = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, device=s.sharding), params)
    optimizer = muon(1e-3)
    shardings = state_shardings(optimizer, params, shard_over="data")
    state = jax.jit(optimizer.init, out_shardings=shardings)(arrays)
    estimate = estimate_memory(optimizer, params, shard_over="data")
    assert estimate.optimizer_state.bytes == on_first_device(state)
    assert estimate.optimizer_state.bytes < 0.26 * estimate_memory(optimizer, params).optimizer_state.bytes


def test_meshes():
    mesh = AbstractMesh((8, 4), ("data", "model"))
    alone = estimate_memory(muon(1e-3), SMALL)
    replicated = estimate_memory(muon(1e-3), SMALL, mesh)
    assert (alone.devices, replicated.devices) == (1, 32)
    assert replicated.parameters == alone.parameters
    cut = published_models.place(SMALL, mesh)
    by_sharding = estimate_memory(muon(1e-3), cut)
    assert by_sharding.parameters.bytes == alone.parameters.bytes // 32
    assert estimate_memory(muon(1e-3), cut, AbstractMesh((2, 2), ("data", "model"))).parameters.bytes == (
        alone.parameters.bytes // 4
    )
    with pytest.raises(ValueError, match="is cut over 'data' by its spec"):
        estimate_memory(muon(1e-3), cut, AbstractMesh((4,), ("x",)))
    other = AbstractMesh((2, 2), ("data", "model"))
    mixed = cut | {"embed": published_models.place(SMALL["embed"], other)}
    with pytest.raises(ValueError, match="on one mesh"):
        estimate_memory(muon(1e-3), mixed)


def test_table():
    estimate = estimate_memory(muon(1e-3), published_models.place(SMALL, AbstractMesh((8,), ("data",))))
    assert [row.name for row in estimate.rows] == [
        "parameters", "gradients", "optimizer state", "temporaries", "total",
    ]  # fmt: skip
    assert estimate.total.bytes == sum(row.bytes for row in estimate.rows[:-1])
    text = str(estimate)
    assert "8 devices, data=8" in text
    assert f"{estimate.optimizer_state.bytes:,}" in text
    assert len(text.splitlines()) == 6


def test_empty_and_untrained_leaves():
    assert estimate_memory(muon(1e-3), {}).total.bytes == 8
    params = SMALL | {"steps": struct(3, dtype=jnp.int32), "nothing": None}
    assert (
        estimate_memory(muon(1e-3), params).parameters.bytes
        == 12 + estimate_memory(muon(1e-3), SMALL).parameters.bytes
    )


@pytest.mark.parametrize("name", published_models.MODELS)
def test_published_totals(name):
    params = published_models.MODELS[name]()
    # measured: -0.1 %, 0.0 %, -1.3 % (stated as 1.04T), 0.0 %, +0.1 %, -1.7 % (stated as 1.6T)
    assert published_models.count(params) == pytest.approx(published_models.PUBLISHED_TOTALS[name], rel=0.02)


# How much less state than AdamW's, and the share of parameters that Muon trains (twice the former).
PUBLISHED_CHANGES = {
    "Qwen2.5-3B": -0.4495,
    "Moonlight-16B-A3B": -0.4790,
    "Kimi-K2": -0.4989,
    "GLM-5": -0.4987,
    "DeepSeek-V4-Flash": -0.4981,
    "DeepSeek-V4-Pro": -0.4994,
}


@pytest.mark.parametrize("name", published_models.MODELS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_state_of_published_models(name, dtype):
    params = published_models.MODELS[name](dtype)
    total, size = published_models.count(params), jnp.dtype(dtype).itemsize
    share = -2 * PUBLISHED_CHANGES[name]
    for devices in (1, 8, 64):
        # ZeRO-1: every device has the parameters and its part of the state.
        params = replicated(params, devices)
        ours, theirs = (
            _memory._bytes(_memory._state(o, params, "data")) for o in (muon(1e-3), optax.adamw(1e-3))
        )
        assert ours / theirs - 1 == pytest.approx(PUBLISHED_CHANGES[name], abs=1e-4)
        assert theirs == pytest.approx(2 * total * size / devices, rel=1e-3)
        assert ours == pytest.approx((2 - share) * total * size / devices, rel=1e-3)


def replicated(params, devices):
    sharding = NamedSharding(_memory._explicit(AbstractMesh((devices,), ("data",))), P())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), params)


def test_qwen_on_eight_devices():
    """Published: 34.5 -> 31.4 GiB per GPU under ZeRO-2 over 8; state explains 1.29 GiB of the 3.1 in float32."""
    for dtype, expected in ((jnp.float32, 1.29), (jnp.bfloat16, 0.646)):
        params = replicated(published_models.qwen2_5_3b(dtype), 8)
        state = estimate_memory(muon(1e-3), params, shard_over="data").optimizer_state
        assert (state.adamw_bytes - state.bytes) / GIB == pytest.approx(expected, abs=5e-3)
    on_muon = np.sum(
        [d.shape and np.prod(d.shape) for d in optax_muon.describe(params).rows if d.label == "muon"]
    )
    assert on_muon == pytest.approx(2.775e9, rel=1e-3)


def test_a_line_that_adamw_does_not_have():
    row = _memory.MemoryRow("temporaries", 10, 0)
    assert row.change == math.inf
    assert _memory.MemoryRow("temporaries", 0, 0).change == 0
    assert str(MemoryEstimate((row,), 1, "")).splitlines()[-1].split() == [
        "temporaries",
        "10",
        "10",
        "B",
        "0",
        "B",
    ]
