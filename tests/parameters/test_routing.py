"""Every leaf of every model in the zoo gets the label and the matrices written there by hand."""

import importlib.util
import pathlib

import jax
import pytest

from optax_muon.parameters import decide

_spec = importlib.util.spec_from_file_location("zoo", pathlib.Path(__file__).parents[1] / "zoo.py")
zoo = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(zoo)


def got(decisions):
    out = {}
    for d in decisions:
        out[d.path] = d.label
        if d.label == "muon":
            (matrices,) = d.view.matrix_shapes(d.shape)
            out[d.path] = (matrices.count, matrices.fan_in, matrices.fan_out)
    return out


@pytest.mark.parametrize("name", zoo.MODELS)
def test_every_leaf_of_the_zoo(name):
    params, expected = zoo.MODELS[name]()
    decisions = decide(params)
    assert got(decisions) == expected
    assert len(decisions) == len(jax.tree.leaves(params))
    assert any(d.label == "muon" for d in decisions)
