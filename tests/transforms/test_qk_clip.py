"""QK-clip: recomputed logits are the threshold, other heads keep their bits, in every layout."""

import re

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optax_muon import (
    FusedHeads,
    MatrixView,
    MultiHead,
    MultiLatent,
    Rule,
    max_attention_logits,
    muon,
    qk_clip,
    qk_clip_transform,
)

D, H, K, T = 16, 4, 8, 6


def normal(shape, seed=0, scale=1.0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, jnp.float32)


X = normal((2, T, D), 99)


def assert_clipped(before, after, threshold, tolerance=1e-5):
    """Clipped heads at the threshold, the others unchanged; both kinds occur."""
    before, after = np.asarray(before, np.float64), np.asarray(after, np.float64)
    over = before > threshold
    assert over.any()
    assert (~over).any()
    np.testing.assert_allclose(after[over], threshold, rtol=tolerance)  # measured 4e-7
    np.testing.assert_array_equal(after[~over], before[~over])


def middle(logits):
    """A threshold between the heads."""
    a = np.sort(np.asarray(logits).ravel())
    return float((a[len(a) // 2 - 1] + a[len(a) // 2]) / 2)


# --- plain trees: MHA, GQA, MLA, fused


def heads_tree(key_heads=H, bias=True):
    tree = {
        "query": {"kernel": normal((D, H, K), 1)},
        "key": {"kernel": normal((D, key_heads, K), 2)},
        "value": {"kernel": normal((D, key_heads, K), 3)},
        "out": {"kernel": normal((H, K, D), 4)},
    }
    if bias:
        tree["query"]["bias"], tree["key"]["bias"] = normal((H, K), 5), normal((key_heads, K), 6)
        tree["value"]["bias"] = normal((key_heads, K), 7)
    return {"layer_0": {"attention": tree}, "norm": {"scale": jnp.ones(D)}}


def heads_logits(params):
    tree = params["layer_0"]["attention"]
    q, k = (
        jnp.einsum("btd,dhk->bthk", X, tree[n]["kernel"]) + tree[n].get("bias", 0) for n in ("query", "key")
    )
    return max_attention_logits(q, k, causal=True)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("key_heads", [H, 2, 1], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("jit", [False, True])
def test_logits_are_exactly_the_threshold(key_heads, bias, jit):
    params = heads_tree(key_heads, bias)
    before = heads_logits(params)
    tau = middle(before)
    clip = jax.jit(qk_clip, static_argnames="threshold") if jit else qk_clip
    clipped = clip(params, {"layer_0": {"attention": before}}, threshold=tau)
    assert_clipped(before, heads_logits(clipped), tau)
    old, new = params["layer_0"]["attention"], clipped["layer_0"]["attention"]
    for name in ("value", "out"):
        np.testing.assert_array_equal(new[name]["kernel"], old[name]["kernel"])
    np.testing.assert_array_equal(clipped["norm"]["scale"], params["norm"]["scale"])
    untouched = np.flatnonzero(np.asarray(before) <= tau)
    for name in ("query", "key") if key_heads == H else ("query",):
        np.testing.assert_array_equal(new[name]["kernel"][:, untouched], old[name]["kernel"][:, untouched])
    if key_heads != H:  # shared keys stay, so that no head moves another
        np.testing.assert_array_equal(new["key"]["kernel"], old["key"]["kernel"])
    assert not np.array_equal(new["query"]["kernel"], old["query"]["kernel"])


def test_power_of_the_query_may_be_chosen():
    params = heads_tree()
    before = heads_logits(params)
    for power in (0.0, 0.25, 1.0):
        clipped = qk_clip(params, before, threshold=middle(before), attention=MultiHead(query_power=power))
        assert_clipped(before, heads_logits(clipped), middle(before))
    with pytest.raises(ValueError, match="its keys are shared by groups of query heads"):
        qk_clip(heads_tree(2), before, attention=MultiHead(query_power=0.5))


NOPE, ROPE, V, RANK = 6, 4, 5, 10


def latent_logits(tree):
    query, up = tree["q_up"]["kernel"].reshape(D, H, -1), tree["kv_up"]["kernel"].reshape(RANK, H, -1)
    q = jnp.einsum("btd,dhk->bthk", X, query)
    latent, rotary = jnp.split(X @ tree["kv_down"]["kernel"], [RANK], -1)
    k = jnp.einsum("btr,rhk->bthk", latent, up[..., :NOPE])
    k = jnp.concatenate([k, jnp.broadcast_to(rotary[:, :, None], (*k.shape[:3], ROPE))], -1)
    return max_attention_logits(q, k, causal=True)


@pytest.mark.parametrize("flat", [False, True])
def test_latent_attention(flat):
    tree = {
        "q_up": {"kernel": normal((D, H, NOPE + ROPE), 1)},
        "kv_down": {"kernel": normal((D, RANK + ROPE), 2)},
        "kv_up": {"kernel": normal((RANK, H, NOPE + V), 3)},
        "out": {"kernel": normal((H, V, D), 4)},
    }
    if flat:
        for name in ("q_up", "kv_up"):
            tree[name]["kernel"] = tree[name]["kernel"].reshape(tree[name]["kernel"].shape[0], -1)
    layout = MultiLatent(nope=NOPE, rope=ROPE, value=V)
    rules = [Rule(".*/(q_up|kv_up)/kernel", MatrixView(0, 1 if flat else (1, 2)))]
    before = latent_logits(tree)
    tau = middle(before)
    params = {"attention": tree}
    new = qk_clip(params, {"attention": before}, threshold=tau, attention=layout, rules=rules)["attention"]
    assert_clipped(before, latent_logits(new), tau)
    np.testing.assert_array_equal(
        new["kv_down"]["kernel"], tree["kv_down"]["kernel"]
    )  # the shared rotary key
    ratio = np.asarray(new["kv_up"]["kernel"] / tree["kv_up"]["kernel"]).reshape(RANK, H, -1)
    np.testing.assert_array_equal(ratio[..., NOPE:], 1)  # values
    gamma = np.minimum(1, tau / np.asarray(before))
    np.testing.assert_allclose(ratio[0, :, 0], np.sqrt(gamma), rtol=1e-6)
    ratio = np.asarray(new["q_up"]["kernel"] / tree["q_up"]["kernel"]).reshape(D, H, -1)
    np.testing.assert_allclose(ratio[0, :, 0], np.sqrt(gamma), rtol=1e-6)
    np.testing.assert_allclose(ratio[0, :, NOPE], gamma, rtol=1e-6)


@pytest.mark.parametrize("key_heads", [H, 2])
@pytest.mark.parametrize("grouped", [False, True])
def test_fused_projections(key_heads, grouped):
    parts = [normal((D, n, K), i) for i, n in enumerate((H, key_heads, key_heads))]
    q, k, v = (p.reshape(D, key_heads, -1) for p in parts)
    fused = (
        jnp.concatenate([q, k, v], -1).reshape(D, -1)
        if grouped
        else jnp.concatenate([p.reshape(D, -1) for p in parts], -1)
    )

    def split(kernel):
        if not grouped:
            q, k, _ = jnp.split(kernel, [H * K, (H + key_heads) * K], -1)
        else:
            per = H // key_heads * K
            q, k, _ = jnp.split(kernel.reshape(D, key_heads, -1), [per, per + K], -1)
        q, k = q.reshape(D, H, K), k.reshape(D, key_heads, K)
        return max_attention_logits(*(jnp.einsum("btd,dhk->bthk", X, w) for w in (q, k)))

    before = split(fused)
    params = {"attention": {"qkv": {"kernel": fused}}}
    layout = FusedHeads(key_heads=key_heads, grouped=grouped)
    new = qk_clip(params, before, threshold=middle(before), attention=layout)["attention"]["qkv"]["kernel"]
    assert_clipped(before, split(new), middle(before))
    if not grouped:
        np.testing.assert_array_equal(new[:, (H + key_heads) * K :], fused[:, (H + key_heads) * K :])


# --- what was recorded need not be finite or large


def test_negative_zero_infinite_and_nan_logits_do_no_harm():
    params = heads_tree()
    for bad in (-50.0, 0.0, -jnp.inf, jnp.inf, jnp.nan):
        logits = jnp.full(H, bad).at[1].set(400.0)
        clipped = qk_clip(params, {"layer_0/attention": logits}, threshold=100.0)
        old, new = (p["layer_0"]["attention"] for p in (params, clipped))
        others = np.array([0, 2, 3])
        for name in ("query", "key"):
            np.testing.assert_array_equal(new[name]["kernel"][:, others], old[name]["kernel"][:, others])
            np.testing.assert_allclose(new[name]["kernel"][:, 1], 0.5 * old[name]["kernel"][:, 1], rtol=1e-6)
            np.testing.assert_allclose(new[name]["bias"][1], 0.5 * old[name]["bias"][1], rtol=1e-6)


def test_untouched_heads_keep_every_bit_even_subnormal_ones():
    kernel = jnp.full((D, H, K), 1e-40, jnp.float32)
    params = {"attention": {"query": {"kernel": kernel}, "key": {"kernel": kernel}}}
    clipped = qk_clip(params, jnp.array([50.0, 500.0, 50.0, 50.0]))
    bits = np.asarray(clipped["attention"]["query"]["kernel"]).view(np.int32)
    np.testing.assert_array_equal(bits[:, 0], np.asarray(kernel).view(np.int32)[:, 0])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_dtypes_stay(dtype):
    params = jax.tree.map(lambda x: x.astype(dtype), heads_tree())
    clipped = qk_clip(params, heads_logits(params), threshold=1.0)
    assert {x.dtype for x in jax.tree.leaves(clipped)} == {jnp.dtype(dtype)}


def test_several_records_of_one_attention_count_by_their_maximum():
    params = heads_tree()
    one, two = jnp.array([300.0, 50.0, 50.0, 50.0]), jnp.array([50.0, 200.0, 50.0, 50.0])
    sown = {"layer_0": {"attention": {"max_logits": (one, two)}}}
    clipped = qk_clip(params, sown)
    expected = qk_clip(params, {"layer_0/attention": jnp.maximum(one, two)})
    for a, b in zip(jax.tree.leaves(clipped), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


# --- frameworks, with the hook that gets the logits out


class MaxLogits(nnx.Variable):
    """The largest logit of each head in the last forward pass."""


class RecordingAttention(nnx.Module):
    def __init__(self, heads):
        self.max_logits = MaxLogits(jnp.zeros(heads))

    def __call__(self, query, key, value, *, mask=None, is_causal=False, **others):
        self.max_logits[...] = max_attention_logits(query, key, mask=mask, causal=is_causal)
        return nnx.dot_product_attention(query, key, value, mask=mask, is_causal=is_causal, **others)


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        # Positions 4 times as large as usual, so that some heads exceed the threshold below.
        init = nnx.initializers.variance_scaling(4.0, "fan_in", "normal")
        self.attention = nnx.MultiHeadAttention(
            H, D, H * K, rngs=rngs, decode=False, kernel_init=init, attention_fn=RecordingAttention(H)
        )
        self.head = nnx.Linear(D, 3, rngs=rngs)

    def __call__(self, x):
        mask = nnx.make_causal_mask(x[..., 0])
        return self.head(self.attention(x, mask=mask))


def test_nnx_attention_inside_a_training_step():
    model = NnxModel(nnx.Rngs(0))
    nnx.jit(lambda m: m(X))(model)
    tau = middle(model.attention.attention_fn.max_logits[...])
    optimizer = nnx.Optimizer(model, optax.chain(muon(0.0), qk_clip_transform(threshold=tau)), wrt=nnx.Param)

    @nnx.jit
    def train(model, optimizer):
        loss, gradients = nnx.value_and_grad(lambda m: jnp.mean(m(X) ** 2))(model)
        optimizer.update(model, gradients, max_logits=nnx.state(model, MaxLogits))
        return loss

    train(model, optimizer)
    before = np.asarray(model.attention.attention_fn.max_logits[...])
    nnx.jit(lambda m: m(X))(model)
    assert_clipped(before, model.attention.attention_fn.max_logits[...], tau)


def record(query, key, value, *, mask=None, module=None, **others):
    """An attention_fn for Linen: with sow_weights=True the attention passes itself as `module`."""
    if module is not None:
        module.sow("intermediates", "max_logits", max_attention_logits(query, key, mask=mask))
    return nn.dot_product_attention(query, key, value, mask=mask, **others)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        attention = nn.MultiHeadDotProductAttention(
            H, qkv_features=H * K, attention_fn=record, name="attention", use_bias=True,
            bias_init=nn.initializers.normal(0.5),
        )  # fmt: skip
        return attention(x, mask=nn.make_causal_mask(x[..., 0]), sow_weights=True), None


def test_linen_attention():
    model = LinenBlock()
    variables = {"params": jax.jit(model.init)(jax.random.key(0), X)["params"]}
    run = jax.jit(lambda v: model.apply(v, X, mutable=["intermediates"])[1]["intermediates"])
    sown = run(variables)
    before = sown["attention"]["max_logits"][0]
    tau = middle(before)
    for params in (variables, variables["params"]):
        clipped = qk_clip(params, {"intermediates": sown} if params is variables else sown, threshold=tau)
        clipped = clipped if params is variables else {"params": clipped}
        assert_clipped(before, run(clipped)["attention"]["max_logits"][0], tau)


@pytest.mark.parametrize("axis", [0, 1])
def test_scanned_linen_attention(axis):
    layers = 3
    model = nn.scan(
        LinenBlock,
        variable_axes={"params": axis, "intermediates": 0},
        split_rngs={"params": True},
        length=layers,
    )()
    params = jax.jit(model.init)(jax.random.key(0), X, None)["params"]
    kernel = params["attention"]["query"]["kernel"]
    assert kernel.shape[axis] == layers
    rules = [Rule(".*/(query|key|value)/kernel", MatrixView(1 - axis, (2, 3)))]
    rules += [Rule(".*/out/kernel", MatrixView((2, 1) if axis == 0 else (0, 2), 3))]
    run = jax.jit(lambda p: model.apply({"params": p}, X, None, mutable=["intermediates"])[1])
    sown = run(params)["intermediates"]
    before = sown["attention"]["max_logits"][0]
    assert before.shape == (layers, H)
    clipped = qk_clip(params, sown, threshold=middle(before), rules=rules)
    gamma = np.minimum(1, middle(before) / np.maximum(np.asarray(before), 1e-9))
    for name in ("query", "key"):
        old, new = (
            np.moveaxis(np.asarray(p["attention"][name]["kernel"]), axis, 0) for p in (params, clipped)
        )
        np.testing.assert_allclose(new, old * np.sqrt(gamma)[:, None, :, None], rtol=1e-6)
        old, new = (np.moveaxis(np.asarray(p["attention"][name]["bias"]), axis, 0) for p in (params, clipped))
        np.testing.assert_allclose(new, old * np.sqrt(gamma)[:, :, None], rtol=1e-6)


def test_equinox_attention():
    model = eqx.nn.MultiheadAttention(
        H, D, qk_size=K, vo_size=K, use_query_bias=True, use_key_bias=True, key=jax.random.key(0)
    )

    @eqx.filter_jit
    def logits(m):
        q, k = (jax.vmap(jax.vmap(p))(X).reshape(2, T, H, K) for p in (m.query_proj, m.key_proj))
        return max_attention_logits(q, k)

    before = logits(model)
    assert model.query_proj.weight.shape == (H * K, D)
    clipped = qk_clip(model, before, threshold=middle(before))
    assert isinstance(clipped, eqx.nn.MultiheadAttention)
    assert_clipped(before, logits(clipped), middle(before))
    np.testing.assert_array_equal(clipped.value_proj.weight, model.value_proj.weight)


# --- normalised queries and keys


def normalised_tree(per_head=False):
    tree = heads_tree(bias=False)
    shape = (H, K) if per_head else (K,)
    tree["layer_0"]["attention"] |= {
        "query_norm": {"scale": 1 + 0.3 * normal(shape, 8)},
        "key_norm": {"scale": 1 + 0.3 * normal(shape, 9)},
    }
    return tree


def normalised_logits(params):
    tree = params["layer_0"]["attention"]
    parts = []
    for name in ("query", "key"):
        x = jnp.einsum("btd,dhk->bthk", X, tree[name]["kernel"])
        x = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
        parts.append(x * tree[f"{name}_norm"]["scale"])
    return max_attention_logits(*parts)


def test_normalised_queries_and_keys_refuse_with_the_reason():
    params = normalised_tree()
    with pytest.raises(
        ValueError, match=r"normalises its queries or keys \(`layer_0/attention/.*normalized="
    ):
        qk_clip(params, {"layer_0/attention": jnp.full(H, 500.0)})


@pytest.mark.parametrize("per_head", [False, True])
def test_gains_of_norms_may_be_scaled_instead(per_head):
    params = normalised_tree(per_head)
    before = normalised_logits(params)
    tau = middle(before)
    clipped = qk_clip(params, before, threshold=tau, normalized="gains")
    for name in ("query", "key"):
        np.testing.assert_array_equal(*(p["layer_0"]["attention"][name]["kernel"] for p in (params, clipped)))
    after = normalised_logits(clipped)
    if per_head:
        assert_clipped(before, after, tau)
    else:  # one gain for all heads: the largest head comes down to the threshold, the others with it
        np.testing.assert_allclose(jnp.max(after), tau, rtol=1e-5)
        np.testing.assert_allclose(after / before, tau / jnp.max(before), rtol=1e-5)


# --- the transformation


def test_the_transformation_clips_what_the_step_gives():
    params = heads_tree()
    gradients = jax.tree.map(lambda p: normal(p.shape, p.size), params)
    logits = heads_logits(params)
    tau = middle(logits)
    optimizer = optax.chain(muon(1e-2, weight_decay=0.0), qk_clip_transform(threshold=tau))
    update = jax.jit(optimizer.update)
    step = lambda seen: update(
        gradients, optimizer.init(params), params, max_logits={"layer_0/attention": seen}
    )[0]
    # The same program with nothing to clip: another one may round otherwise.
    updates, plain = step(logits), step(jnp.zeros_like(logits))
    alone, _ = jax.jit(muon(1e-2, weight_decay=0.0).update)(gradients, optimizer.init(params)[0], params)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-7)  # measured 2.3e-9
    expected = qk_clip(optax.apply_updates(params, plain), logits, threshold=tau)
    got = optax.apply_updates(params, updates)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-7)  # measured 1.2e-7
    untouched = np.flatnonzero(np.asarray(logits) <= tau)
    for tree in (updates, plain):
        tree["keep"] = tree["layer_0"]["attention"]["query"]["kernel"][:, untouched]
    np.testing.assert_array_equal(updates["keep"], plain["keep"])
    for name in ("out", "value"):
        np.testing.assert_array_equal(*(t["layer_0"]["attention"][name]["kernel"] for t in (updates, plain)))
    s = np.linalg.svd(np.asarray(plain["layer_0"]["attention"]["out"]["kernel"]).reshape(H * K, D))[1]
    assert s.min() > 0.5 * 1e-2 * 0.2 * np.sqrt(H * K)  # Muon ran


def test_the_transformation_needs_params_and_logits():
    params = heads_tree()
    transformation = qk_clip_transform()
    with pytest.raises(ValueError, match="qk_clip_transform needs max_logits"):
        transformation.update(params, transformation.init(params), params)
    with pytest.raises(ValueError, match="qk_clip_transform needs params"):
        transformation.update(params, transformation.init(params), max_logits=jnp.ones(H))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("logits_spec", [PartitionSpec(), PartitionSpec("x")])
@pytest.mark.parametrize("key_heads", [H, 2])
def test_sharded_heads(axis_type, logits_spec, key_heads):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(axis_type,) * 2)
    params, specs = heads_tree(key_heads), {2: ("x", None), 3: (None, "x", None)}
    before = heads_logits(params)
    tau = middle(before)
    expected = qk_clip(params, before, threshold=tau)
    with jax.set_mesh(mesh):
        put = lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*specs.get(x.ndim, ()))))
        sharded = jax.tree.map(put, params)
        logits = {"layer_0/attention": jax.device_put(before, NamedSharding(mesh, logits_spec))}
        compiled = jax.jit(lambda p, s: qk_clip(p, s, threshold=tau)).lower(sharded, logits).compile()
        got = compiled(sharded, logits)
    if logits_spec == PartitionSpec():
        assert not re.search(r"all-(gather|to-all|reduce)\(", compiled.as_text())  # no weight travels
    for a, b, p in zip(*map(jax.tree.leaves, (got, expected, sharded)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), b)
        assert a.sharding.is_equivalent_to(p.sharding, a.ndim)


# --- the helper


def test_max_attention_logits_honours_masks_and_blocks():
    q, k = normal((2, T, H, K), 1), normal((2, T, 2, K), 2)
    logits = jnp.einsum("bthk,bshk->bhts", q, jnp.repeat(k, 2, 2)) / np.sqrt(K)
    seen = np.tril(np.ones((T, T), bool))
    causal = np.where(seen, logits, -np.inf).max((0, 2, 3))
    np.testing.assert_allclose(max_attention_logits(q, k), logits.max((0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(max_attention_logits(q, k, causal=True), causal, rtol=1e-6)
    np.testing.assert_allclose(max_attention_logits(q, k, mask=jnp.asarray(seen)), causal, rtol=1e-6)
    for block in (1, 2, 3):
        got = max_attention_logits(q, k, causal=True, query_block=block)
        np.testing.assert_allclose(got, causal, rtol=1e-6)
        got = max_attention_logits(q, k, mask=jnp.asarray(seen)[None, None], query_block=block)
        np.testing.assert_allclose(got, causal, rtol=1e-6)
    assert not np.allclose(causal, logits.max((0, 2, 3)))
    last = max_attention_logits(q[:, -1:], k, causal=True)  # one query at the end of a cache
    np.testing.assert_allclose(last, logits[:, :, -1].max((0, 2)), rtol=1e-6)
    empty = max_attention_logits(q, k, mask=jnp.zeros((T, T), bool))
    assert jnp.all(empty == -jnp.inf)
    gradient = jax.grad(lambda q: max_attention_logits(q, k).sum())(q)
    assert not jnp.any(gradient)


def test_max_attention_logits_refuses_what_does_not_fit():
    q, k = normal((2, T, H, K), 1), normal((2, T, 3, K), 2)
    with pytest.raises(ValueError, match="4 query heads cannot share 3 key heads"):
        max_attention_logits(q, k)
    with pytest.raises(ValueError, match="query_block=4 does not divide the 6"):
        max_attention_logits(q, k[:, :, :2], query_block=4)
    with pytest.raises(ValueError, match=r"mask has shape \(3, 6, 6\)"):
        max_attention_logits(q, k[:, :, :2], mask=jnp.ones((3, T, T), bool))


# --- errors


@pytest.mark.parametrize(
    ("params", "logits", "changes", "message"),
    [
        ({"dense": {"kernel": jnp.ones((4, 4))}}, jnp.ones(2), {}, "found no attention in params"),
        (heads_tree(), {"layer_1/attention": jnp.ones(H)}, {}, "entry `layer_1/attention`, but the att"),
        (heads_tree(), {}, {}, "max_logits has no array"),
        (heads_tree(), {"layer_0/attention": jnp.ones(5)}, {}, "5 heads do not divide its 32 query outputs"),
        (heads_tree(), {"layer_0/attention": jnp.ones((2, H))}, {}, r"so it must be \(heads\)"),
        (heads_tree(), {"layer_0/attention": jnp.float32(1)}, {}, r"so it must be \(heads\)"),
        (
            heads_tree(3, False),
            {"layer_0/attention": jnp.ones(H)},
            {},
            "4 query heads of width 8 cannot share its 24",
        ),
        (heads_tree(), jnp.ones(H), {"threshold": 0.0}, "threshold must be finite and positive"),
        (heads_tree(), jnp.ones(H), {"normalized": "maybe"}, "normalized must be one of"),
        (
            heads_tree(),
            jnp.ones(H),
            {"attention": MultiLatent(nope=4, rope=2, value=2, query=("query",), key_value=("key",))},
            r"4 heads of nope \+ (rope|value) = 6 make 24 (query|key) outputs, not 32",
        ),
        (
            {"attention": {"qkv": {"kernel": jnp.ones((8, 30))}}},
            jnp.ones(4),
            {"attention": FusedHeads(key_heads=2)},
            "4 query and 2 key and value heads do not divide its 30 outputs",
        ),
        (
            {"a": {**heads_tree(bias=False)["layer_0"]["attention"], "query": {
                "kernel": normal((D, H, K)), "lora_a": normal((D, 2)), "lora_b": normal((2, H * K)),
            }}},
            jnp.ones(H),
            {},
            "Merge adapters into their weight",
        ),
    ],
)  # fmt: skip
def test_clear_errors(params, logits, changes, message):
    with pytest.raises(ValueError, match=message):
        qk_clip(params, logits, **changes)


def test_errors_of_kind():
    with pytest.raises(TypeError, match="must be floating"):
        qk_clip(heads_tree(), jnp.ones(H, jnp.int32))
    with pytest.raises(ValueError, match="nope=0; give the width"):
        MultiLatent(nope=0, rope=2, value=2)
