"""Rules from live models know what paths cannot: groups, axes of general layers, modules with odd names."""

import jax
import jax.numpy as jnp

from optax_muon._module_rules import rules_from_equinox, rules_from_linen, rules_from_nnx
from optax_muon.parameters import decide


def shapes(params, rules=None):
    out = {}
    for d in decide(params, rules):
        assert rules is None or d.rule != "shape", d.path
        m = d.view.matrix_shapes(d.shape) if d.label == "muon" else ()
        out[d.path] = [(x.count, x.fan_in, x.fan_out) for x in m] or d.label
    return out


def test_nnx_classes():
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.one = nnx.LinearGeneral((3, 4), 5, axis=(-2, -1), use_bias=False, rngs=rngs)
            self.two = nnx.LinearGeneral(3, (4, 5), use_bias=False, rngs=rngs)
            self.grouped = nnx.Conv(8, 16, (3, 3), feature_group_count=4, rngs=rngs)
            self.odd = nnx.Conv(8, 8, (3,), feature_group_count=8, rngs=rngs)
            self.table = nnx.Embed(9, 4, rngs=rngs)
            self.time_embed = nnx.Linear(4, 8, rngs=rngs)
            self.lm_head = nnx.Linear(4, 9, rngs=rngs)
            self.items = nnx.List([nnx.Linear(4, 6, rngs=rngs)])
            stacked = nnx.split_rngs(splits=4)(nnx.vmap(lambda r: nnx.Linear(4, 4, use_bias=False, rngs=r)))
            self.stack = stacked(rngs)

    model = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    params = nnx.state(model, nnx.Param)
    rules = rules_from_nnx(model)
    got = shapes(params, rules)
    assert got == {
        "one/kernel": [(1, 12, 5)],
        "two/kernel": [(1, 3, 20)],
        "grouped/kernel": [(4, 18, 4)],
        "grouped/bias": "adamw",
        "odd/kernel": "adamw",
        "odd/bias": "adamw",
        "table/embedding": "adamw",
        "time_embed/kernel": [(1, 4, 8)],
        "time_embed/bias": "adamw",
        "lm_head/kernel": "adamw",
        "lm_head/bias": "adamw",
        "items/0/kernel": [(1, 4, 6)],
        "items/0/bias": "adamw",
        "stack/kernel": [(4, 4, 4)],
    }
    assert any("nnx.Conv" in rule.because for rule in rules)
    # the model itself as the tree of parameters needs no rules
    assert shapes(nnx.eval_shape(lambda: nnx.Conv(8, 16, (3,), feature_group_count=4, rngs=nnx.Rngs(0)))) == {
        "bias": "adamw",
        "kernel": [(4, 6, 4)],
    }


def test_linen_classes():
    import flax.linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            y = nn.DenseGeneral((2, 3), use_bias=False, name="one")(x)
            y = nn.DenseGeneral(x.shape[-1], axis=(-2, -1), use_bias=False, name="two")(y)
            return x + y, None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            for axis in (0, 1):
                scan = nn.scan(Block, variable_axes={"params": axis}, split_rngs={"params": True}, length=5)
                x, _ = scan(name=f"scan{axis}")(x, None)
            x = nn.Conv(8, (3,), feature_group_count=2, name="foo")(x)
            x = nn.BatchNorm(use_running_average=not train)(x)
            return nn.Dense(9, name="embed")(x)

    x = jax.ShapeDtypeStruct((2, 7, 4), jnp.float32)
    params = jax.eval_shape(lambda: Model().init(jax.random.key(0), jnp.zeros(x.shape), False))["params"]
    rules = rules_from_linen(Model(), x, train=False)
    assert shapes(params, rules) == {
        "scan0/one/kernel": [(5, 4, 6)],
        "scan0/two/kernel": [(5, 6, 4)],
        "scan1/one/kernel": [(5, 4, 6)],
        "scan1/two/kernel": [(5, 6, 4)],
        "foo/kernel": [(2, 6, 4)],
        "foo/bias": "adamw",
        "BatchNorm_0/scale": "adamw",
        "BatchNorm_0/bias": "adamw",
        "embed/kernel": [(1, 8, 9)],
        "embed/bias": "adamw",
    }


def test_equinox_classes_serve_another_container():
    import equinox as eqx

    model = eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(0))
    rules = rules_from_equinox(model)
    layers = [{"weight": x.weight, "bias": x.bias} for x in model.layers]
    assert shapes({"layers": layers}, rules) == {
        "layers/0/weight": [(1, 4, 8)],
        "layers/0/bias": "adamw",
        "layers/1/weight": [(1, 8, 3)],
        "layers/1/bias": "adamw",
    }
