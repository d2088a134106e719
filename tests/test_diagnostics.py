"""Measurements of updates: against NumPy, on every mesh without gathering, and recorded in the state."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_muon
from optax_muon import MatrixView, Rule, contiguous_blocks, diagnostics, muon

QUERY = MatrixView(0, (1, 2))


def normal(shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def exact(x, measure):
    """The measurement of one matrix from its singular values, in float64."""
    s = np.linalg.svd(np.asarray(x, np.float64), compute_uv=False)
    if measure == "spectral_norm":
        return s[0]
    return np.sqrt(np.mean((s**2 / np.mean(s**2) - 1) ** 2))


SPECTRA = {
    "gaussian": lambda: normal((96, 64)),
    "orthogonalised": lambda: optax_muon.orthogonalize(normal((40, 96))),
    "low_rank": lambda: normal((64, 3)) @ normal((3, 128), 1),
    "rank_one": lambda: jnp.outer(normal((30,)), normal((50,), 1)),
    "decaying": lambda: normal((48, 48)) * jnp.exp(-jnp.arange(48.0) / 4),
    "tall_bf16": lambda: normal((100, 20), dtype=jnp.bfloat16),
}


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_norms_and_spread_are_those_of_the_singular_values(spectrum):
    x = SPECTRA[spectrum]()
    x = x if x.dtype == jnp.bfloat16 else x.astype(jnp.float32)
    # measured 1.8e-6 relative, after 16 Lanczos steps
    np.testing.assert_allclose(diagnostics.spectral_norm(x), exact(x, "spectral_norm"), rtol=1e-3)
    all_steps = diagnostics.spectral_norm(x, iterations=200)
    np.testing.assert_allclose(all_steps, exact(x, "spectral_norm"), rtol=1e-5)  # measured 1e-6
    np.testing.assert_allclose(
        diagnostics.polar_error(x, probes=200), exact(x, "polar_error"), rtol=1e-4
    )  # measured 1.8e-7
    # 32 probes: a relative error of sqrt(2 / (32 * 48)) = 4 % where singular values are alike; measured 7 %
    np.testing.assert_allclose(diagnostics.polar_error(x), exact(x, "polar_error"), rtol=0.25)
    expected = np.sqrt(np.mean(np.asarray(x, np.float64) ** 2))
    np.testing.assert_allclose(diagnostics.update_rms(x), expected, rtol=1e-5)
    s = np.linalg.svd(np.asarray(x, np.float64), compute_uv=False)
    np.testing.assert_allclose(diagnostics.singular_values(x), s, atol=1e-5 * s[0])


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scale_is_carried_over_the_whole_range(scale):
    x = normal((16, 24))
    for measure in (diagnostics.spectral_norm, diagnostics.update_rms):
        np.testing.assert_allclose(measure(x * scale) / scale, measure(x), rtol=1e-5)  # measured 1.2e-7
    np.testing.assert_allclose(diagnostics.polar_error(x * scale), diagnostics.polar_error(x), rtol=1e-4)
    np.testing.assert_allclose(diagnostics.cosine(x * scale, x), 1.0, rtol=1e-6)


def test_zeros_and_nans():
    zero, nan = jnp.zeros((4, 6)), jnp.full((4, 6), jnp.nan)
    assert float(diagnostics.spectral_norm(zero)) == float(diagnostics.update_rms(zero)) == 0
    assert float(diagnostics.cosine(zero, zero)) == 0
    assert float(diagnostics.polar_error(zero)) == 1
    for measure in (diagnostics.spectral_norm, diagnostics.polar_error, diagnostics.update_rms):
        assert jnp.isnan(measure(nan))


def test_stacks_views_and_blocks_are_measured_matrix_by_matrix():
    stack = normal((2, 3, 8, 12))
    alone = jnp.stack([diagnostics.spectral_norm(x) for x in stack.reshape(6, 8, 12)]).reshape(2, 3)
    np.testing.assert_allclose(diagnostics.spectral_norm(stack), alone, rtol=1e-6)
    query = normal((16, 4, 8))
    chex.assert_trees_all_close(
        diagnostics.polar_error(query, QUERY)[0], diagnostics.polar_error(query.reshape(16, 32)), rtol=1e-5
    )
    fused = normal((8, 20))
    view = MatrixView(0, 1, contiguous_blocks(1, (12, 4, 4)))
    parts = jnp.split(fused, (12, 16), axis=1)
    for measure in (diagnostics.spectral_norm, diagnostics.polar_error, diagnostics.update_rms):
        np.testing.assert_allclose(measure(fused, view), [measure(x) for x in parts], rtol=1e-5)
    together = diagnostics.cosine(fused, -fused, view)
    np.testing.assert_allclose(together, -np.ones(3), rtol=1e-6)
    assert diagnostics.singular_values(query, QUERY).shape == (1, 16)


MEASURES = {
    "spectral_norm": functools.partial(diagnostics.spectral_norm, view=QUERY),
    "polar_error": functools.partial(diagnostics.polar_error, view=QUERY, probes=4),
    "update_rms": diagnostics.update_rms,
    "cosine": lambda x: diagnostics.cosine(x, x + 1),
}


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
@pytest.mark.parametrize("measure", MEASURES)
def test_no_matrix_is_gathered_on_a_mesh(kind, measure):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    host = normal((64, 4, 32))
    x = jax.device_put(host, NamedSharding(mesh, P("data", "model")))
    expected = MEASURES[measure](host)
    compiled = jax.jit(MEASURES[measure]).lower(x).compile()
    result = compiled(x)
    assert result.sharding.is_equivalent_to(NamedSharding(mesh, P()), result.ndim)
    np.testing.assert_allclose(result, expected, rtol=1e-5)  # measured 1.7e-7
    np.testing.assert_allclose(MEASURES[measure](x), expected, rtol=1e-5)
    results = re.findall(r" = (.*) (?:all-[a-z]+|collective-permute)\(", compiled.as_text())
    moved = [dims for result in results for dims in re.findall(r"\w+\[([\d,]*)\]", result)]
    assert moved
    # A device's shard has 1024 entries, the leaf 8192. Measured: 512 (four probes of 128), else 128
    assert max(np.prod([int(n) for n in dims.split(",") if n]) for dims in moved) <= 512


# --- recorded


def tree(seed=0):
    return {
        "up": {"kernel": normal((16, 32), seed), "bias": normal((32,), seed + 1)},
        "layers": {"kernel": normal((3, 12, 8), seed + 2)},
        "embed": {"embedding": normal((32, 16), seed + 3)},
    }


RULES = [Rule("layers/kernel", MatrixView(1, 2))]


def test_measurements_are_recorded_and_updates_untouched():
    inner = muon(1e-2, rules=RULES, weight_decay=0.0)
    optimizer, params = diagnostics.record(inner), tree()
    state, plain = optimizer.init(params), inner.init(params)
    chex.assert_trees_all_equal_structs(state, jax.eval_shape(optimizer.init, params))
    update, bare = jax.jit(optimizer.update), jax.jit(inner.update)
    for seed in (10, 20):
        gradients = tree(seed)
        updates, state = update(gradients, state, params)
        expected, plain = bare(gradients, plain, params)
    # measured 0 here; in another program XLA may order the products otherwise
    chex.assert_trees_all_close(updates, expected, rtol=1e-5, atol=1e-8)
    assert update._cache_size() == 1
    measured = diagnostics.latest(state, params)
    assert set(measured["update_rms"]) == {"up/kernel", "up/bias", "layers/kernel", "embed/embedding"}
    assert (
        set(measured["polar_error"])
        == {"up/kernel", "layers/kernel"}
        == set(measured["weight_spectral_norm"])
    )
    kernel = np.asarray(updates["up"]["kernel"], np.float64)
    np.testing.assert_allclose(measured["update_rms"]["up/kernel"], np.sqrt(np.mean(kernel**2)), rtol=1e-5)
    np.testing.assert_allclose(
        measured["update_spectral_norm"]["up/kernel"], np.linalg.norm(kernel, 2), rtol=1e-4
    )
    # Muon ran: the RMS is 0.2 times the rate and Keller's 0.68 to 1.13, the spread of singular values small
    assert 0.68 < measured["update_rms"]["up/kernel"] / 2e-3 < 1.13
    assert measured["polar_error"]["up/kernel"] < 0.45 < exact(gradients["up"]["kernel"], "polar_error")
    layers = [np.linalg.norm(np.asarray(w, np.float64), 2) for w in params["layers"]["kernel"]]
    np.testing.assert_allclose(measured["weight_spectral_norm"]["layers/kernel"], max(layers), rtol=1e-4)
    g, u = (np.asarray(t["embed"]["embedding"], np.float64).ravel() for t in (gradients, updates))
    np.testing.assert_allclose(
        measured["cosine"]["embed/embedding"], -g @ u / np.linalg.norm(g) / np.linalg.norm(u), rtol=1e-4
    )
    assert all(value > 0 for value in measured["cosine"].values())  # every step goes downhill


def test_recording_every_few_steps_and_inside_a_chain():
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        diagnostics.record(optax.chain(muon(1e-2, rules=RULES)), every=2, rules=RULES),
    )
    params = tree()
    state, seen = optimizer.init(params), []
    update = jax.jit(optimizer.update)
    for seed in range(4):
        _, state = update(tree(seed), state, params)
        seen.append(diagnostics.latest(state, params)["update_rms"]["layers/kernel"])
    assert seen[0] == seen[1] != seen[2] == seen[3]
    assert "layers/kernel" in diagnostics.latest(state, params)["polar_error"]
    specs = jax.tree.map(lambda _: P("data"), params)
    mapped = optax.tree.map_params(
        optimizer, lambda _, spec: spec, state, specs, is_leaf=lambda x: isinstance(x, optax.MaskedNode)
    )
    assert mapped[1].values.update_rms.shape == (4,)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
def test_records_on_a_mesh_equal_those_of_one_device(kind):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    place = lambda t: jax.tree.map(
        lambda x: jax.device_put(x, NamedSharding(mesh, P("data", "model") if x.ndim == 2 else P())), t
    )
    params, gradients = tree(), tree(5)
    optimizer = diagnostics.record(muon(1e-2, rules=RULES), every=2)
    _, expected = jax.jit(optimizer.update)(gradients, optimizer.init(params), params)
    params, gradients = place(params), place(gradients)
    optimizer = diagnostics.record(muon(1e-2, rules=RULES), every=2)
    traces = []

    @jax.jit
    def update(state):
        traces.append(1)
        return optimizer.update(gradients, state, params)[1]

    after = update(optimizer.init(params))
    later = update(after)
    assert len(traces) == 1
    # measured 4.3e-7 relative
    chex.assert_trees_all_close(jax.device_get(after.values), jax.device_get(expected.values), rtol=1e-4)
    chex.assert_trees_all_equal(later.values, after.values)


def test_what_diverges_stays_visible():
    optimizer, params = diagnostics.record(muon(1e-2, rules=RULES)), tree()
    broken = tree(3) | {"up": jax.tree.map(lambda x: x * jnp.nan, tree(3)["up"])}
    _, state = jax.jit(optimizer.update)(broken, optimizer.init(params), params)
    measured = diagnostics.latest(state, params)
    assert np.isnan(measured["update_rms"]["up/kernel"])
    assert np.isnan(measured["polar_error"]["up/kernel"])
    assert np.isfinite(measured["polar_error"]["layers/kernel"])


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        diagnostics.record(muon(1e-2), every=0)
    optimizer, params = diagnostics.record(muon(1e-2, rules=RULES)), tree()
    with pytest.raises(ValueError, match="record measures the weights too"):
        optimizer.update(params, optimizer.init(params))
    with pytest.raises(ValueError, match="the state holds no measurements"):
        diagnostics.latest(muon(1e-2, rules=RULES).init(params), params)
    with pytest.raises(ValueError, match="measures 4 parameters, but params has 2"):
        diagnostics.latest(optimizer.init(params), params["up"])
    with pytest.raises(ValueError, match=r"x has shape \(3,\), but a matrix has rank 2"):
        diagnostics.spectral_norm(jnp.ones(3))
    with pytest.raises(TypeError, match="floating arrays, got int32"):
        diagnostics.update_rms(jnp.ones(3, jnp.int32))
    with pytest.raises(ValueError, match=r"x has shape \(3,\), but y \(4,\)"):
        diagnostics.cosine(jnp.ones(3), jnp.ones(4))
    with pytest.raises(ValueError, match="measurement must be one of"):
        diagnostics.plot_history([], "loss")


def test_figures():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    gradient = normal((16, 4, 8))
    ax = diagnostics.plot_spectra(
        {"gradient": gradient, "update": optax_muon.orthogonalize(gradient, view=QUERY)}, QUERY
    )
    before, after = (line.get_ydata() for line in ax.lines)
    assert before.max() / before.min() > 2 * after.max() / after.min()
    history = [{"update_rms": {"a": 0.1 * t, "b": 0.2}} for t in range(5)]
    ax = diagnostics.plot_history(history, ax=pyplot.figure().add_subplot())
    assert [line.get_label() for line in ax.lines] == ["a", "b"]
    np.testing.assert_allclose(ax.lines[0].get_ydata(), 0.1 * np.arange(5))
    pyplot.close("all")
