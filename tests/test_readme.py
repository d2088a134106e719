"""The README's code runs, in order, in one namespace; and its commands are the ones CI calls."""

import pathlib
import re

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_muon
from optax_muon import Rule, describe

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_python_blocks_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 2
    namespace: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    table = capsys.readouterr().out
    assert "hidden/kernel" in table
    assert "muon" in table


def test_every_public_name_is_documented():
    undocumented = [n for n in optax_muon.__all__ if not getattr(optax_muon, n).__doc__ and not n.isupper()]
    assert not undocumented


@pytest.mark.parametrize("needle", ["python -m pytest", "examples/train_gpt.py"])
def test_the_commands_are_there(needle):
    assert needle in README


def test_nothing_names_a_machine():
    """The repository stands alone: no absolute path of a home or workplace in a tracked text."""
    for path in ROOT.rglob("*"):
        relative = path.relative_to(ROOT)
        if path.suffix in {".py", ".md", ".toml", ".ipynb", ".jsonl"} and not any(
            p.startswith(".") for p in relative.parts
        ):
            assert not re.search(r"/(home|root|work|opt)/[a-z]", path.read_text()), relative


def rules_in(text):
    """Every `Rule(r"...", None)` written in a passage."""
    return [Rule(pattern, None) for pattern in re.findall(r'`Rule\(r"([^"]+)", None\)`', text)]


def test_the_rules_for_unnamed_last_layers_work():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(nn.Dense(8)(nn.Dense(8)(x)))

    linen, equinox = rules_in(README.split("My last layer has no telling name")[1].split("\n- ")[0])
    params = jax.eval_shape(Net().init, jax.random.key(0), jnp.ones((1, 4)))["params"]
    muon_leaves = lambda tree, rule: [
        row.path for row in describe(tree, rules=rule).rows if row.label == "muon"
    ]
    assert muon_leaves(params, None) == ["Dense_0/kernel", "Dense_1/kernel", "Dense_2/kernel"]
    assert muon_leaves(params, linen) == ["Dense_0/kernel", "Dense_1/kernel"]
    mlp = {"net": eqx.filter(eqx.nn.MLP(4, 3, 8, 2, key=jax.random.key(0)), eqx.is_inexact_array)}
    assert muon_leaves(mlp, equinox) == ["net/layers/0/weight", "net/layers/1/weight"]


@pytest.mark.parametrize("shape", [(32, 128), (128, 32), (64, 64)])
def test_the_translated_rate_gives_the_same_step(shape):
    """Keller Jordan's scale at lr is ours at r, the formula of the table "Moving here"."""
    fan_in, fan_out = shape
    rate = 0.02 * max(1, fan_out / fan_in) ** 0.5 / (0.2 * max(shape) ** 0.5)
    params = {"dense": {"kernel": jax.random.normal(jax.random.key(0), shape)}}
    step = lambda tx: tx.update(params, tx.init(params), params)[0]["dense"]["kernel"]
    theirs = step(optax_muon.recipes.keller(0.02))
    # measured 2.4e-7 relative: two orders of the same product
    np.testing.assert_allclose(step(optax_muon.muon(rate, weight_decay=0.0)), theirs, rtol=1e-5, atol=1e-9)
