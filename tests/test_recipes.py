"""Every recipe: numbers against the float64 reference, routing, and other packages' own trajectories."""

import pathlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_muon
from optax_muon import (
    MatrixView,
    Orthogonalizer,
    Rule,
    add_cautious_decayed_weights,
    describe,
    muon,
    orthogonalize,
    recipes,
    renormalize,
    scale_by_muon,
    scale_by_normuon,
    scale_by_shape,
    shape_factors,
)
from optax_muon.orthogonalization import DEEPSEEK_V4, KELLER, POLAR_EXPRESS_5, YOU, Frobenius
from tests import reference as ref

GOLDEN = np.load(pathlib.Path(__file__).parent / "data" / "peer_trajectories.npz")
SHAPES = ("tall", "wide", "square")
LR = 0.02


def trajectory(transformation, shape, name="kernel", steps=4):
    """Weights after each step on the golden inputs, in their (out, in) layout; Flax kernels are (in, out)."""
    # A bias, so that AdamW has something to train.
    params = {"dense": {name: jnp.asarray(GOLDEN[f"in/w0/{shape}"].T), "bias": jnp.zeros(3)}}
    state, update, out = transformation.init(params), jax.jit(transformation.update), []
    for g in GOLDEN[f"in/g/{shape}"][:steps]:
        updates, state = update({"dense": {name: jnp.asarray(g.T), "bias": jnp.ones(3)}}, state, params)
        params = optax.apply_updates(params, updates)
        out.append(np.asarray(params["dense"][name]).T)
    return np.stack(out)


def distance(ours, theirs, shape):
    """Relative to the movement of the weights over the four steps."""
    start = GOLDEN[f"in/w0/{shape}"]
    return np.linalg.norm(ours - theirs) / np.linalg.norm(theirs - start)


# --- float32 parity with the float64 reference

MOONLIGHT = {"factor": ref.sqrt_max(0.2), "weight_decay": 0.1}
KELLER_JORDAN = {"factor": ref.sqrt_ratio_min_one, "weight_decay": 0.0}
PE5 = {"coefficients": POLAR_EXPRESS_5, "safety": 1.02}
NUMBERS = {
    "keller": KELLER_JORDAN,
    "torch": {"factor": ref.sqrt_ratio_min_one, "weight_decay": 0.1},
    "moonlight": MOONLIGHT,
    "kimi_k2": MOONLIGHT,
    "kimi_k3": MOONLIGHT,
    "glm45": MOONLIGHT,
    "glm5": MOONLIGHT,
    "deepseek_v4": {"factor": ref.sqrt_max(0.18), "weight_decay": 0.1, "coefficients": DEEPSEEK_V4},
    "deepspeed": KELLER_JORDAN,
    "megatron": {"factor": ref.sqrt_max(0.2), "weight_decay": 0.1, "coefficients": YOU, "nesterov": None},
    "dion": {"factor": ref.sqrt_ratio, "weight_decay": 0.01, "nesterov": None, **PE5},
    "modded_nanogpt": {
        "factor": ref.sqrt_ratio_min_one,
        "momentum": lambda t: 0.85 + 0.1 * t / 300,
        "cautious": True,
        "normuon_beta2": 0.9,
        "normuon_variant": "modded",
        **PE5,
    },
}


def recipe(name, learning_rate=LR, **changes):
    return getattr(recipes, name)(learning_rate, **changes)


@pytest.mark.filterwarnings(
    "ignore:Rule.*matches no leaf"
)  # a Dense has no heads for kimi_k3 and glm5 to split
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NUMBERS)
def test_recipe_follows_the_reference(name, shape):
    start, numbers = GOLDEN[f"in/w0/{shape}"], dict(NUMBERS[name])
    if name == "modded_nanogpt":  # its decay stands before the factor, and follows the rate
        numbers["weight_decay"] = 1.2 * LR * numbers["factor"](*start.shape[::-1])
    expected = ref.muon_trajectory(start, GOLDEN[f"in/g/{shape}"], learning_rate=LR, layout="oi", **numbers)
    ours = trajectory(recipe(name), shape)
    assert np.abs(ours - expected).max() < 1e-5  # measured 8e-7
    # Relative to the movement: measured 5e-7 to 3e-6; 1e-5 where 'auto' takes the Gram form; bound 2e-5.
    assert distance(ours, expected, shape) < 2e-5


def test_the_list_is_complete():
    public = {n for n in vars(recipes) if not n.startswith("_") and callable(getattr(recipes, n))}
    from_here = {n for n in public if getattr(recipes, n).__module__ == "optax_muon._recipes"}
    assert from_here == set(NUMBERS)


@pytest.mark.parametrize("name", NUMBERS)
def test_unknown_arguments_are_refused(name):
    with pytest.raises(TypeError, match="momentun"):
        recipe(name, momentun=0.9)


# --- trajectories of other packages' own code (lr .02, decay .1)

EO = {"nesterov": None, "shape_factor": shape_factors.sqrt_max(1.0)}
ONE = {"weight_decay": 0.1}
RMS = shape_factors.sqrt_max(0.2)


def with_chain(*parts, learning_rate=LR, make=muon, **momentum):
    """A chain of public parts in the place of Muon's own."""
    chain = optax.chain(scale_by_muon(**momentum), *parts, optax.scale_by_learning_rate(learning_rate))
    return make(learning_rate, transforms={"muon": chain})


def eo_normuon():
    """NVIDIA's adaptive Muon: the statistic over the short side, no Nesterov, factor sqrt(max(in, out))."""
    return with_chain(
        scale_by_normuon(over="short_side", epsilon=1e-4),
        scale_by_shape(shape_factors.sqrt_max(1.0)),
        optax.add_decayed_weights(0.1),
        nesterov=None,
        orthogonalizer=Orthogonalizer(coefficients=YOU),
    )


def dion_normuon():
    return with_chain(
        scale_by_normuon(),
        scale_by_shape(shape_factors.sqrt_ratio()),
        optax.add_decayed_weights(0.1),
        nesterov=None,
        orthogonalizer=Orthogonalizer(coefficients=POLAR_EXPRESS_5, normalization=Frobenius(safety=1.02)),
    )


# (how to run ours, bound on the distance relative to the movement)
PEERS = {
    # float32 iterations: measured 6e-7 to 1.3e-6, 1e-5 where 'auto' takes the Gram form; bound 2e-5
    "EO_Muon_fp32_quintic_spectral_nonesterov": (lambda: recipes.megatron(LR, **EO), 2e-5),
    "EO_Muon_fp32_simple_shape_nesterov": (lambda: recipes.torch(LR), 2e-5),
    "EO_Muon_fp32_simple_rms02_nesterov": (lambda: recipes.moonlight(LR), 2e-5),
    "EO_NorMuon_fp32": (eo_normuon, 2e-5),
    # bfloat16 inside: measured 2.5e-2 (KJ, Moonlight), 9e-3 to 1.3e-2 (the others); bound 4e-2
    "KJ_SingleDeviceMuon": (lambda: recipes.keller(LR, **ONE), 4e-2),
    "Moonlight": (lambda: recipes.moonlight(LR), 4e-2),
    "torch213_original": (lambda: recipes.torch(LR), 4e-2),
    "torch213_match_rms_adamw": (lambda: recipes.torch(LR, shape_factor=RMS), 4e-2),
    "torch213_original_nonesterov": (lambda: recipes.torch(LR, nesterov=None), 4e-2),
    "pytorch_optimizer41_Muon": (lambda: recipes.torch(LR), 4e-2),
    "pytorch_optimizer41_Muon_adjusted": (lambda: recipes.moonlight(LR), 4e-2),
    "dionMuon_NSyou_nesterov_spectral": (
        lambda: recipes.dion(LR, nesterov="torch", orthogonalizer=Orthogonalizer(coefficients=YOU), **ONE),
        4e-2,
    ),
    # Polar Express in bfloat16: measured 2.6e-2 to 3.3e-2; bound 5e-2
    "dionMuon_default_PE_spectral": (lambda: recipes.dion(LR, **ONE), 5e-2),
    "dionMuon_PE_rms_cwd": (lambda: recipes.dion(LR, shape_factor=RMS, cautious=True, **ONE), 5e-2),
    "dionNorMuon_default_PE_spectral": (dion_normuon, 5e-2),
    "modded_NorMuon": (lambda: recipes.modded_nanogpt(0.023, momentum=0.95), 5e-2),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("peer", PEERS)
def test_recipe_follows_the_packages_own_trajectory(peer, shape):
    make, bound = PEERS[peer]
    theirs = GOLDEN[f"opt/{peer}/{shape}"]
    ours = trajectory(make(), shape)
    assert distance(ours, theirs, shape) < bound
    if bound == 2e-5:
        assert np.abs(ours - theirs).max() < 1e-5  # measured 8e-7


def test_cautious_decay_is_seen_in_the_peers_trajectory():
    """bfloat16 hides it from a distance, so: which of the two lies nearer along their difference."""
    for shape in SHAPES:
        theirs = GOLDEN[f"opt/dionMuon_PE_rms_cwd/{shape}"]
        runs = [
            trajectory(recipes.dion(LR, shape_factor=RMS, cautious=c, **ONE), shape) for c in (True, False)
        ]
        apart = runs[1] - runs[0]
        where = np.sum(apart * (theirs - runs[0])) / np.sum(apart**2)
        assert abs(where) < 0.25, where  # 0 is cautious, 1 is not; measured -0.06 to -0.01


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_live_against_torch(shape, adjust):
    torch = pytest.importorskip("torch")
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch.optim.Muon came with PyTorch 2.9")
    weight = torch.nn.Parameter(torch.tensor(GOLDEN[f"in/w0/{shape}"]))
    optimizer = torch.optim.Muon([weight], lr=LR, weight_decay=0.1, adjust_lr_fn=adjust)
    theirs = []
    for g in GOLDEN[f"in/g/{shape}"]:
        weight.grad = torch.tensor(g)
        optimizer.step()
        theirs.append(weight.detach().numpy().copy())
    factor = {"original": {}, "match_rms_adamw": {"shape_factor": RMS}}[adjust]
    ours = trajectory(recipes.torch(LR, **factor), shape)
    assert distance(ours, np.stack(theirs), shape) < 3e-2  # its bfloat16: measured 1.1e-2


@pytest.mark.parametrize("shape", SHAPES)
def test_live_against_optax_contrib(shape):
    theirs = trajectory(optax.contrib.muon(LR, weight_decay=0.1), shape)
    # optax's width factor is sqrt(max(1, out/in)), its Nesterov divides by the bias.
    ours = trajectory(recipes.torch(LR, nesterov="optax"), shape)
    assert distance(ours, theirs, shape) < 1e-5  # measured 9e-7
    torch_form = trajectory(recipes.torch(LR), shape)
    assert distance(torch_form, theirs, shape) > 1e-2  # the two forms differ


# --- DeepSeek-V4's promises


def low_rank_gradient(shape, rank, noise, seed=0):
    rng = np.random.default_rng(seed)
    g = rng.normal(size=(shape[0], rank)) @ rng.normal(size=(rank, shape[1]))
    return jnp.asarray(g + noise * rng.normal(size=shape), jnp.float32)


def test_deepseek_v4_is_polar_to_6e_4():
    orthogonalizer = recipes.deepseek_v4().config.orthogonalizer
    rng = np.random.default_rng(0)
    for shape in ((32, 48), (48, 32), (40, 40)):
        u, _, vt = np.linalg.svd(rng.normal(size=shape), full_matrices=False)
        s = np.geomspace(1.0, 1e-3, len(vt) if len(vt) < len(u) else u.shape[1])
        s = s / np.linalg.norm(s)
        s = np.maximum(s, 1e-3)
        got = orthogonalize(jnp.asarray(u * s @ vt, jnp.float32), orthogonalizer)
        error = np.linalg.norm(np.asarray(got, np.float64) - u @ vt, 2)
        assert error <= 6e-4, error  # measured 5.4e-4


def update_rms(transformation, gradient):
    params = {"dense": {"kernel": jnp.zeros_like(gradient)}}
    updates, _ = transformation.update({"dense": {"kernel": gradient}}, transformation.init(params), params)
    return float(jnp.sqrt(jnp.mean(updates["dense"]["kernel"] ** 2)))


@pytest.mark.parametrize("shape", [(64, 128), (128, 64), (96, 96)])
@pytest.mark.parametrize("rank", [1, 4, 16])
def test_deepseek_v4_update_rms_on_low_rank_gradients(shape, rank):
    # Low rank in a little noise, which is what gradients are: its ten steps lift the noise too.
    noisy = low_rank_gradient(shape, rank, noise=0.02)
    rms = update_rms(recipes.deepseek_v4(1.0), noisy) / 0.18
    assert abs(rms - 1) < 0.01, rms  # measured within 7e-3
    assert update_rms(muon(1.0, shape_factor=shape_factors.sqrt_max(0.18)), noisy) / 0.18 < rms
    # Of exactly low rank: the directions are not there, unless the norm is made exact.
    exact = low_rank_gradient(shape, rank, noise=0.0)
    numbers = recipes.deepseek_v4(1.0).config
    parts = (renormalize(), scale_by_shape(numbers.shape_factor), optax.add_decayed_weights(0.1))
    renormalized = with_chain(
        *parts, learning_rate=1.0, make=recipes.deepseek_v4, orthogonalizer=numbers.orthogonalizer
    )
    assert abs(update_rms(renormalized, exact) / 0.18 - 1) < 1e-5  # measured 2e-7


# --- routing


MODEL = {
    "embed": {"embedding": jnp.ones((32, 8))},
    "position_embedding": jnp.ones((16, 8)),
    "block": {
        "up": {"kernel": jnp.ones((8, 16)), "bias": jnp.zeros(16)},
        "experts": {"w_up": jnp.ones((3, 8, 16))},
        "norm": {"scale": jnp.ones(8)},
    },
    "output": {"kernel": jnp.ones((8, 32))},
    "lm_head": {"kernel": jnp.ones((8, 32))},
}


def on_muon(transformation, params):
    return {r.path for r in describe(params, transformation).rows if r.label == "muon"}


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("moonlight", set()),
        ("deepseek_v4", set()),
        ("glm45", {"output/kernel", "lm_head/kernel"}),
        ("deepspeed", {"output/kernel"}),
    ],
)
def test_which_leaves_get_muon(name, more):
    assert on_muon(recipe(name), MODEL) == {"block/up/kernel", "block/experts/w_up"} | more


def test_label_functions_know_the_users_rules():
    params = {"odd": jnp.ones((3, 4, 5)), "lm_head": {"kernel": jnp.ones((4, 9))}}
    for name in ("glm45", "deepspeed"):
        transformation = recipe(name, rules=[Rule("odd", MatrixView(1, 2))])
        assert "odd" in on_muon(transformation, params)
        transformation.init(params)
        assert transformation == recipe(name, rules=[Rule("odd", MatrixView(1, 2))])


def normal(shape, seed):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def one_step(transformation, params):
    gradients = jax.tree.map(lambda p: normal(p.shape, p.size), params)
    return gradients, transformation.update(gradients, transformation.init(params), params)[0]


@pytest.mark.parametrize("stored", ["flat", "heads", "out_in"])
@pytest.mark.parametrize("stack", [(), (2,)])
def test_glm5_splits_every_head_and_keys_from_values(stored, stack):
    d, heads, nope, rope, value = 12, 3, 6, 2, 10

    def leaf(width, seed):
        x = normal((*stack, d, heads, width), seed)
        flat = x.reshape(*stack, d, heads * width)
        return {"flat": flat, "heads": x, "out_in": jnp.swapaxes(flat, -1, -2)}[stored]

    name = "weight" if stored == "out_in" else "kernel"
    params = {"attention": {"q_up": {name: leaf(nope + rope, 1)}, "kv_up": {name: leaf(nope + value, 2)}}}
    transformation = recipes.glm5(LR, nope=nope, rope=rope, value=value, stored=stored, weight_decay=0.0)
    gradients, updates = one_step(transformation, params)

    def as_heads(tree, module):
        x = tree["attention"][module][name]
        x = jnp.swapaxes(x, -1, -2) if stored == "out_in" else x
        return x.reshape(*stack, d, heads, -1)

    plain = recipes.glm45(LR, weight_decay=0.0)
    for module, parts in (("q_up", [(0, nope + rope)]), ("kv_up", [(0, nope), (nope, nope + value)])):
        for index in np.ndindex(*stack, heads):
            for start, stop in parts:
                cut = (*index[:-1], slice(None), index[-1], slice(start, stop))
                alone = {"dense": {"kernel": as_heads(gradients, module)[cut]}}
                expected, _ = plain.update(alone, plain.init(alone), alone)
                got = as_heads(updates, module)[cut]
                # measured 2e-8; bound 1e-6
                np.testing.assert_allclose(got, expected["dense"]["kernel"], atol=1e-6)
    fused = [x.shape for x in jax.tree.leaves(params)]
    assert [x.shape for x in jax.tree.leaves(transformation.init(params)) if x.ndim] == fused


def test_kimi_k3_splits_queries_keys_and_values_by_head():
    params = {
        "attention": {
            n: {"kernel": normal((12, 24), i)} for i, n in enumerate(("query", "key", "value", "out"))
        }
    }
    transformation = recipes.kimi_k3(LR, head_dim=8, latent=None, weight_decay=0.0)
    gradients, updates = one_step(transformation, params)
    plain = recipes.kimi_k2(LR, weight_decay=0.0)
    for name, parts in (("query", 3), ("value", 3), ("out", 1)):
        for g, u in zip(
            *(jnp.split(t["attention"][name]["kernel"], parts, -1) for t in (gradients, updates)), strict=True
        ):
            alone = {"dense": {"kernel": g}}
            expected, _ = plain.update(alone, plain.init(alone), alone)
            np.testing.assert_allclose(u, expected["dense"]["kernel"], atol=1e-6)  # measured 1e-8
    with pytest.raises(ValueError, match="has width 1; blocks of one row"):
        recipes.kimi_k3(LR, head_dim=1, latent=None)
    with pytest.raises(ValueError, match="stored must be one of 'flat'"):
        recipes.kimi_k3(LR, stored="sideways")


# --- modded-nanogpt's other parts


def test_modded_nanogpt_moves_embeddings_every_second_step_with_cautious_decay():
    params = {"embed": {"embedding": normal((6, 4), 0)}, "norm": {"scale": normal((4,), 1)}}
    gradients = [jax.tree.map(lambda p, s=s: normal(p.shape, 10 * s + p.ndim), params) for s in range(4)]
    schedule = lambda t: 0.023 / (t + 1)
    transformation = recipes.modded_nanogpt(schedule)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no hidden matrix here
        state = transformation.init(params)
    moved = []
    for g in gradients:
        updates, state = jax.jit(transformation.update)(g, state, params)
        moved.append(updates)
        params = optax.apply_updates(params, updates)
    assert not any(jnp.any(x) for s in (0, 2) for x in jax.tree.leaves(moved[s]))
    m = v = 0.0
    w = np.asarray(normal((6, 4), 0), np.float64)
    for t, (first, second) in enumerate(((0, 1), (2, 3)), start=1):
        g = np.mean([np.asarray(gradients[s]["embed"]["embedding"], np.float64) for s in (first, second)], 0)
        m, v = 0.5 * m + 0.5 * g, 0.95 * v + 0.05 * g * g
        u = m / (1 - 0.5**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-10)
        rate = 0.008 / (second + 1)
        step = rate * (u + 0.75 * rate * np.where(u * w >= 0, w, 0))
        np.testing.assert_allclose(-moved[second]["embed"]["embedding"], step, rtol=1e-4)  # measured 3e-6
        w = w - step


def test_modded_nanogpt_doubles_the_rate_of_chosen_leaves():
    kernels = {"c_fc": normal((8, 16), 0), "c_proj": normal((16, 8), 1)}
    params = {"mlp": {name: {"kernel": x, "bias": jnp.zeros(3)} for name, x in kernels.items()}}
    twice = recipes.modded_nanogpt(LR, doubled=".*/c_proj/kernel")
    once = recipes.modded_nanogpt(LR)
    gradients, updates = one_step(twice, params)
    plain, _ = once.update(gradients, once.init(params), params)
    np.testing.assert_allclose(
        updates["mlp"]["c_proj"]["kernel"], 2 * plain["mlp"]["c_proj"]["kernel"], atol=2e-6
    )
    np.testing.assert_array_equal(updates["mlp"]["c_fc"]["kernel"], plain["mlp"]["c_fc"]["kernel"])
    s = np.linalg.svd(np.asarray(plain["mlp"]["c_fc"]["kernel"]), compute_uv=False)
    assert s.min() > 0.3 * LR  # Muon ran


# --- recipes in use


@pytest.mark.filterwarnings("ignore:Rule.*matches no leaf")
@pytest.mark.parametrize("name", NUMBERS)
def test_recipe_trains_a_model_without_recompiling(name):
    params = jax.tree.map(lambda p: p + 0.1 * normal(p.shape, p.size), MODEL)
    transformation = recipe(name, 1e-2)
    state, traces = transformation.init(params), []

    @jax.jit
    def step(params, state):
        traces.append(1)
        gradients = jax.grad(lambda p: sum(jnp.sum(x**2) for x in jax.tree.leaves(p)))(params)
        updates, state = transformation.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    before = sum(float(jnp.sum(x**2)) for x in jax.tree.leaves(params))
    for _ in range(4):
        params, state = step(params, state)
    after = sum(float(jnp.sum(x**2)) for x in jax.tree.leaves(params))
    assert after < before
    assert len(traces) == 1
    assert all(jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(params))


@pytest.mark.parametrize("name", ["moonlight", "deepseek_v4", "dion", "modded_nanogpt"])
def test_recipe_under_inject_hyperparams(name):
    params = {"dense": {"kernel": normal((8, 16), 0), "bias": jnp.zeros(3)}}
    # inject_hyperparams reads the signature, where **changes is no hyperparameter.
    injected = optax.inject_hyperparams(lambda learning_rate: recipe(name, learning_rate))(LR)
    gradients, updates = one_step(injected, params)
    plain = recipe(name)
    expected, _ = plain.update(gradients, plain.init(params), params)
    np.testing.assert_allclose(updates["dense"]["kernel"], expected["dense"]["kernel"], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["keller", "deepspeed", "modded_nanogpt"])
def test_only_what_the_user_gave_is_warned_about(name):
    params = {"dense": {"kernel": jnp.ones((4, 8))}}  # nothing for AdamW
    recipe = getattr(recipes, name)
    assert optax_muon.param_labels(params) == {"dense": {"kernel": "muon"}}
    recipe(0.02).init(params)  # a warning would be an error
    with pytest.warns(UserWarning, match="adamw_learning_rate was given"):
        recipe(0.02, adamw_learning_rate=1e-3).init(params)


def test_recipes_are_built_of_public_parts():
    for part in (scale_by_normuon, add_cautious_decayed_weights, renormalize, scale_by_muon, scale_by_shape):
        assert part.__name__ in optax_muon.__all__
    assert recipes.keller().config.orthogonalizer == Orthogonalizer(coefficients=KELLER)
