"""`describe` shows every decision, on abstract trees, with the numbers of an optimizer beside it."""

import jax
import jax.numpy as jnp
import optax
import pytest

from optax_muon import Rule, describe, muon
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
