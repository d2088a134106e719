"""`describe` shows every decision, on abstract trees, with the numbers of an optimizer beside it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from optax_muon import Rule, describe, diagnostics, muon
from optax_muon.orthogonalization import Orthogonalizer
from optax_muon.transforms import shape_factors


def s(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


PARAMS = {"embed": {"embedding": s(96, 8)}, "up": {"kernel": s(8, 32), "bias": s(32)}, "odd": s(4, 5)}


def rows(*args, **kwargs):
    return {row.path: row for row in describe(*args, **kwargs).rows}


def test_every_leaf_has_a_row_and_every_label_its_share():
    description = describe(PARAMS)
    assert [row.path for row in description.rows] == ["embed/embedding", "odd", "up/bias", "up/kernel"]
    # WatChMaL/WatChMaL #108: the share of elements shows when a model is hardly trained by Muon
    assert description.shares == {"muon": 276 / 1076, "adamw": 800 / 1076}
    text = str(description)
    assert "muon: 2 leaves, 276 elements (25.7%)" in text
    assert "8 x 32" in text
    assert "? shape: no rule; a matrix (in, out)" in text
    assert "? marks a guess" in text


def test_html_escapes_what_users_write():
    html = describe(PARAMS, rules=Rule("odd", None, "<script>"))._repr_html_()
    assert "<table>" in html
    assert "&lt;script&gt;" in html
    assert "<script>" not in html


def test_optimizer_gives_rates_factors_and_methods():  # vllm-project/speculators #866
    orthogonalizer = Orthogonalizer(method="svd")
    optimizer = muon(
        0.5,
        adamw_learning_rate=optax.linear_schedule(1.0, 0.0, 10),
        shape_factor=shape_factors.sqrt_max(0.2),
        orthogonalizer=orthogonalizer,
        rules=[Rule("odd", None, "ours")],
    )
    got = rows(PARAMS, optimizer)
    assert got["up/kernel"].learning_rate == 0.5
    assert got["up/kernel"].factors == (0.2 * 32**0.5,)
    assert got["up/kernel"].methods == ("svd",)
    assert callable(got["up/bias"].learning_rate)
    assert (got["odd"].label, got["odd"].because) == ("adamw", "ours")
    text = str(describe(PARAMS, optimizer))
    assert "schedule" in text
    assert "1.131" in text
    moved = rows(PARAMS, muon(0.5, adamw_learning_rate=0.1, rules=[Rule("up/kernel", None)]))
    assert moved["up/kernel"].learning_rate == 0.1


def test_rules_come_before_those_of_the_optimizer():
    optimizer = muon(0.1, rules=[Rule("odd", None)])
    assert rows(PARAMS, optimizer)["odd"].label == "adamw"
    assert rows(PARAMS, optimizer, rules=Rule("odd", "muon"))["odd"].label == "muon"


def test_labels_of_the_optimizer_are_shown():
    optimizer = muon(
        0.1, param_labels={"embed": "slow", "up": None, "odd": "frozen"}, transforms={"slow": optax.sgd(0.1)}
    )
    got = rows(PARAMS, optimizer)
    assert (got["embed/embedding"].label, got["embed/embedding"].learning_rate) == ("slow", None)
    assert got["odd"].label == "frozen"


def test_a_chain_hides_the_optimizer():
    with pytest.raises(TypeError, match="pass what muon"):
        describe(PARAMS, optax.chain(optax.identity(), muon(0.1)))


def test_empty_tree():
    assert str(describe({})).endswith("no leaves")


def test_measurements_of_a_record_are_shown():
    rules = [Rule("odd", "muon")]
    params = jax.tree.map(
        lambda x: jnp.asarray(np.random.default_rng(0).normal(size=x.shape), x.dtype), PARAMS
    )
    optimizer = diagnostics.record(muon(1e-2, weight_decay=0.0, rules=rules))
    state = optimizer.init(params)
    before = describe(params, optimizer, state=state)
    assert not any(row.measured for row in before.rows)
    assert "polar error" not in str(before)
    updates, state = jax.jit(optimizer.update)(params, state, params)
    description = describe(params, optimizer, state=state)
    got = {row.path: row.measured for row in description.rows}
    kernel = np.asarray(updates["up"]["kernel"], np.float64)
    assert got["up/kernel"]["update_rms"] == pytest.approx(
        np.sqrt(np.mean(kernel**2)), rel=1e-5
    )  # measured 2e-8
    # Muon ran: the spread of singular values is Keller's, and that of the gradient, .49, larger
    assert got["up/kernel"]["polar_error"] < 0.45  # measured .20
    assert got["odd"]["polar_error"] < 0.45  # measured .30
    assert set(got["up/bias"]) == {"update_rms", "weight_rms", "cosine"}
    header, _, *lines = str(description).splitlines()
    for column in ("rate", "update rms", "update spectral norm", "polar error", "cosine"):
        assert column in header
    line = next(line for line in lines if line.startswith("up/kernel"))
    assert f"{got['up/kernel']['polar_error']:.3g}" in line
    assert f"<td>{got['up/kernel']['update_rms']:.3g}</td>" in description._repr_html_()
    # The state of a chain, without an optimizer that would tell rates; bare parameters route `odd` alike
    chain = optax.chain(optax.clip_by_global_norm(1.0), optimizer)
    _, state = jax.jit(chain.update)(params, chain.init(params), params)
    text = str(describe(params, rules=rules, state=state))
    assert "update rms" in text
    assert "factor" not in text.splitlines()[0]


def test_measurements_of_an_nnx_optimizer_are_shown():
    model = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, diagnostics.record(muon(1e-2)), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        gradients = nnx.grad(lambda m: jnp.sum(m(jnp.arange(16.0).reshape(2, 8)) ** 2))(model)
        optimizer.update(model, gradients)

    step(model, optimizer)
    params = nnx.state(model, nnx.Param)
    (row,) = (row for row in describe(params, state=optimizer.opt_state).rows if row.label == "muon")
    assert row.measured["update_rms"] > 0


def test_a_state_without_measurements_is_named():
    params = jax.tree.map(jnp.zeros_like, {"up": {"kernel": jnp.ones((4, 8))}})
    with pytest.raises(ValueError, match=r"describe: the state holds no measurements.*diagnostics.record"):
        describe(params, state=muon(0.1).init(params))
    state = diagnostics.record(muon(0.1)).init(params)
    state = state._replace(count=state.count + 1)
    with pytest.raises(ValueError, match="The state measures 1 parameters, but params has 2"):
        describe(params | {"down": {"kernel": jnp.ones((8, 4))}}, state=state)
