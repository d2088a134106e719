"""Which optimizer a leaf gets: faults that users of other packages reported, as what must hold here."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_muon import MatrixView, Rule, describe, muon, param_labels, recipes, shape_factors
from optax_muon.parameters import _rules as rules_module
from optax_muon.parameters import decays, decide


def normal(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def s(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def step(tx, params, gradients):
    return tx.update(gradients, tx.init(params), params)[0]


def in_band(update, factor):
    """Whether the singular values are Keller's (0.68 to 1.14, wider for a small one): Muon ran."""
    singular = np.linalg.svd(np.asarray(update, np.float64), compute_uv=False) / factor
    return 0.6 < singular.min() <= singular.max() < 1.25


@pytest.mark.parametrize("shape", [(64, 1), (1, 64), (1, 1)])
def test_a_vector_forced_to_muon_is_normalised(shape):  # vllm-project/speculators #821
    g = {"head": {"kernel": normal(shape)}}
    default = step(muon(1.0, weight_decay=0.0), g, g)["head"]["kernel"]
    assert jnp.all(jnp.isfinite(default))
    forced = step(muon(1.0, weight_decay=0.0, rules=Rule("head/kernel", MatrixView(0, 1))), g, g)
    u, direction = (np.asarray(x, np.float64) for x in (forced["head"]["kernel"], g["head"]["kernel"]))
    size = np.linalg.norm(u) / (0.2 * max(shape) ** 0.5)
    assert 0.68 < size < 1.14  # Keller's map of a single singular value 1: 0.70 here
    cosine = -np.sum(u * direction) / np.linalg.norm(u) / np.linalg.norm(direction)
    np.testing.assert_allclose(cosine, 1, atol=1e-6)  # measured 3e-8


def test_lora_is_finite_at_step_one_and_its_a_may_take_adamw():  # Nerogar/OneTrainer #1314
    factors = {"lora_a": normal((64, 4)), "lora_b": jnp.zeros((4, 64))}
    params = {"q": {"kernel": normal((64, 64), 1)} | factors}
    gradients = {
        "q": {"kernel": normal((64, 64), 2), "lora_a": jnp.zeros((64, 4)), "lora_b": normal((4, 64))}
    }
    b_only = [Rule(r".*/lora_a", None, "AdamW on A, Muon on B"), Rule(".*/kernel", "frozen")]
    for rules in (b_only[1:], b_only):
        tx = muon(1.0, weight_decay=0.0, rules=rules)
        state = tx.init(params)
        updates, _ = tx.update(gradients, state, params)
        assert all(bool(jnp.all(jnp.isfinite(u))) for u in jax.tree.leaves(updates))
        assert in_band(updates["q"]["lora_b"], 0.2 * 8)
        assert not jnp.any(updates["q"]["lora_a"])
        assert not jnp.any(updates["q"]["kernel"])
        assert all(x.shape != (64, 64) for x in jax.tree.leaves(state))  # the base keeps no state
    assert param_labels(params, b_only)["q"] == {"lora_a": "adamw", "lora_b": "muon", "kernel": "frozen"}


@pytest.mark.filterwarnings("ignore:No leaf gets Muon")
@pytest.mark.parametrize(
    ("params", "labels"),
    [
        ({"up": {"kernel": normal((4, 6))}, "down": {"kernel": normal((6, 4))}}, None),
        ({"a": {"bias": normal((4,))}, "norm": {"scale": normal((6,))}}, None),
        (
            {"up": {"kernel": normal((4, 6)), "bias": normal((6,))}, "down": {"kernel": normal((6, 4))}},
            {"up": "frozen", "down": "muon"},
        ),
        ({"up": {"kernel": normal((4, 6))}}, "frozen"),
        ({}, None),
    ],
    ids=["only matrices", "only biases", "one matrix trained", "all frozen", "empty"],
)
def test_a_group_may_be_empty(params, labels):  # deepspeedai/DeepSpeed #7869, pytorch/pytorch #143828
    tx = muon(1.0, param_labels=labels)
    state = jax.jit(tx.init)(params)
    updates, after = jax.jit(tx.update)(params, state, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    frozen = [d.label == "frozen" for d in decide(params, None, labels)]
    assert [not jnp.any(u) for u in jax.tree.leaves(updates)] == frozen
    for d, u in zip(decide(params, None, labels), jax.tree.leaves(updates), strict=True):
        assert d.label != "muon" or jnp.linalg.norm(u) > 0.2 * 6**0.5


def test_what_cannot_be_a_matrix_raises_at_init():  # MoonshotAI/Moonlight #37, #27
    everything = lambda p: jax.tree.map(lambda _: "muon", p)
    with pytest.raises(ValueError, match=r"`foo` has shape \(4, 8, 16\).*Add Rule\(r\"foo\", MatrixView"):
        muon(1e-2, param_labels=everything).init({"foo": jnp.ones((4, 8, 16))})
    # KellerJordan/Muon #45: a ravelled matrix is none
    with pytest.raises(ValueError, match=r"`flat` has shape \(128,\).*it is no matrix"):
        muon(1e-2, param_labels=everything).init({"flat": jnp.ones(128)})


def test_one_rule_alone_is_a_list_of_one():  # keras-team/keras #21079
    params = {"down": {"kernel": normal((6, 4))}, "up": {"kernel": normal((4, 6))}}
    rule = Rule("up/kernel", None)
    alone = step(muon(1e-2, rules=rule), params, params)
    assert in_band(alone["down"]["kernel"] + 1e-3 * params["down"]["kernel"], 1e-2 * 0.2 * 6**0.5)
    assert not in_band(alone["up"]["kernel"] + 1e-3 * params["up"]["kernel"], 1e-2 * 0.2 * 6**0.5)
    chex.assert_trees_all_equal(alone, step(muon(1e-2, rules=[rule]), params, params))
    assert muon(1e-2, rules=rule) == muon(1e-2, rules=[rule])
    with pytest.raises(TypeError, match=r"rules must be a sequence of optax_muon.Rule, got 'head'"):
        muon(1e-2, rules="head")


def test_patterns_never_run_in_a_step(monkeypatch):  # keras-team/keras #23162
    ran = []
    compile_, fullmatch = re.compile, re.fullmatch

    class Counting:
        def __init__(self, pattern):
            self.pattern, self.given = pattern, compile_(pattern)

        def fullmatch(self, text):
            ran.append(self.pattern)
            return self.given.fullmatch(text)

    class Module:
        compile, sub, error = Counting, re.sub, re.error

        @staticmethod
        def fullmatch(pattern, text):
            ran.append(pattern)
            return fullmatch(pattern, text)

    params = {"up": {"kernel": normal((4, 6)), "bias": normal((6,))}, "down": {"kernel": normal((6, 4))}}
    monkeypatch.setattr(rules_module, "re", Module)
    tx = muon(1e-2, rules=[Rule("up/kernel", None), Rule("(a+)+b?", None, "idle")])
    with pytest.warns(UserWarning, match="matches no leaf"):
        state = tx.init(params)
    once = len(ran)
    assert 0 < once <= 2 * 3 + 3  # each pattern once for each path, and once more to see that it is idle
    update = jax.jit(tx.update)
    for _ in range(3):
        updates, state = update(params, state, params)
        tx.update(params, state, params)
        muon(1e-2, rules=[Rule("up/kernel", None), Rule("(a+)+b?", None, "idle")]).init(params)
    assert len(ran) == once
    assert in_band(updates["down"]["kernel"] + 1e-3 * params["down"]["kernel"], 1e-2 * 0.2 * 6**0.5)


def test_the_common_questions_have_a_reason_to_read():  # KellerJordan/Muon #31, pytorch/pytorch #180561
    params = {
        "patch_embed": {"kernel": s(16, 16, 3, 64)},
        "projector": {"fc1": {"kernel": s(32, 64)}, "fc2": {"kernel": s(64, 64)}},
        "dpt_head": {"conv": {"kernel": s(3, 3, 64, 2)}},
    }
    import equinox as eqx

    # The class says that it is a convolution; the name says which one.
    patches = eqx.filter_eval_shape(eqx.nn.Conv2d, 3, 8, 4, key=jax.random.key(0))
    assert param_labels({"patch_embed": eqx.filter(patches, lambda x: hasattr(x, "shape"))})[
        "patch_embed"
    ].weight == ("adamw")
    rows = {row.path: row for row in describe(params).rows}
    assert rows["patch_embed/kernel"].because == "patch embeddings are the input layer"
    assert (rows["projector/fc1/kernel"].label, rows["projector/fc2/kernel"].label) == ("muon", "muon")
    assert rows["dpt_head/conv/kernel"].because == "output heads and classifiers"
    assert all(row.because and row.rule for row in rows.values())


def test_norm_scales_and_biases_of_a_bert_are_not_decayed():  # huggingface/transformers #11936
    layer = {
        "attention": {
            "self": {n: {"kernel": s(8, 8), "bias": s(8)} for n in ("query", "key", "value")},
            "output": {
                "dense": {"kernel": s(8, 8), "bias": s(8)},
                "LayerNorm": {"scale": s(8), "bias": s(8)},
            },
        },
        "output": {"dense": {"kernel": s(32, 8), "bias": s(8)}, "LayerNorm": {"scale": s(8), "bias": s(8)}},
    }
    embeddings = {"word_embeddings": {"embedding": s(99, 8)}, "LayerNorm": {"scale": s(8), "bias": s(8)}}
    params = {"bert": {"embeddings": embeddings, "encoder": {"layer": {"0": layer, "1": layer}}}}
    for d in decide(params):
        assert decays(d) == d.path.endswith(("kernel", "embedding")), d.path


def test_options_come_from_a_configuration_file():  # AI-Hypercomputer/maxtext #2546
    options = {"momentum": 0.9, "nesterov": "optax", "mu_dtype": "bfloat16", "weight_decay": 0, "rate": 1e-2}
    options |= {"shape_factor": "sqrt_ratio", "recipe": "moonlight"}
    factor = getattr(shape_factors, options.pop("shape_factor"))()
    make, rate = getattr(recipes, options.pop("recipe")), options.pop("rate")
    params = {"up": {"kernel": normal((8, 16))}, "embed": {"embedding": normal((9, 8))}}
    tx = make(rate, shape_factor=factor, **options)
    assert in_band(step(tx, params, params)["up"]["kernel"], 1e-2 * 2**0.5)
    with pytest.raises(TypeError, match=r"learning_rate must be a number or a schedule.*'1e-3'"):
        muon("1e-3")  # what YAML makes of a number without a point


def test_options_without_effect_are_refused():  # jolibrain/joliGEN #809
    from optax_muon import KELLER, Orthogonalizer

    with pytest.raises(ValueError, match="restarts"):
        Orthogonalizer(method="svd", restarts=(1,))
    with pytest.raises(TypeError):
        Orthogonalizer(coefficients=KELLER, steps=50)
    with pytest.warns(UserWarning, match="adamw_weight_decay"):
        muon(1e-2, adamw_weight_decay=0.0).init({"dense": {"kernel": normal((8, 8))}})


@pytest.mark.parametrize("name", ["MoeBlock_0", "moe_block", "routed_experts", "GptOssMlp"])
def test_experts_train_one_by_one_under_any_name(name):
    # AI-Hypercomputer/maxtext #4798, marin-community/marin #8621: no norm or axis is shared between experts
    params = {name: {"wi_0": normal((2, 8, 12)), "wo": normal((2, 12, 8), 1)}}
    gradients = jax.tree.map(lambda p: normal(p.shape, 2).at[1].multiply(1000), params)
    updates = step(muon(1e-2), params, gradients)
    for e in range(2):
        one = lambda t, e=e: jax.tree.map(lambda x: x[e], t)
        alone = step(muon(1e-2), one(params), one(gradients))
        chex.assert_trees_all_close(one(updates), alone, atol=1e-7)  # measured 1e-8
    decay = 1e-3 * params[name]["wo"][1]
    assert in_band(updates[name]["wo"][1] + decay, 1e-2 * 0.2 * 12**0.5)
    four = {name: {"wi_0": normal((3, 2, 8, 12))}}
    by_rule = muon(1e-2, rules=Rule(".*/wi_0", MatrixView(-2, -1)))
    together = step(by_rule, four, four)[name]["wi_0"]
    alone = step(
        muon(1e-2), {"up": {"kernel": four[name]["wi_0"][2, 1]}}, {"up": {"kernel": four[name]["wi_0"][2, 1]}}
    )
    chex.assert_trees_all_close(together[2, 1], alone["up"]["kernel"], atol=1e-7)
