"""Rules, labels, containers, errors and warnings of the routing."""

import dataclasses
import re
import typing
import warnings

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_muon import muon
from optax_muon.parameters import (
    MatrixView,
    Rule,
    by_path,
    contiguous_blocks,
    decays,
    decide,
    leaf_paths,
    matrix_views,
    param_labels,
    rules_from_names,
)
from optax_muon.parameters import _rules as rules_module


def s(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def labels(params, **kwargs):
    return {d.path: d.label for d in decide(params, **kwargs)}


TREE = {"embed": {"embedding": s(9, 4)}, "up": {"kernel": s(4, 8), "bias": s(8)}}
LABELS = {"embed/embedding": "adamw", "up/bias": "adamw", "up/kernel": "muon"}


# ------------------------------------------------------------------------------------------- containers


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: typing.Any
    bias: typing.Any


class Pair(typing.NamedTuple):
    up: typing.Any
    embed: typing.Any


def test_one_path_in_every_container():  # keras-team/keras #21793
    from flax import nnx

    layer = {"kernel": s(4, 8), "bias": s(8)}
    containers = {
        "dict": {"up": layer, "embed": {"embedding": s(9, 4)}},
        "frozen": flax.core.freeze({"up": layer, "embed": {"embedding": s(9, 4)}}),
        "named": Pair(up=layer, embed={"embedding": s(9, 4)}),
        "dataclass": {"up": Layer(**layer), "embed": {"embedding": s(9, 4)}},
        "state": nnx.State({"up": layer, "embed": {"embedding": s(9, 4)}}),
        "variables": nnx.State(
            {"up": {k: nnx.Param(v) for k, v in layer.items()}, "embed": {"embedding": nnx.Param(s(9, 4))}}
        ),
    }
    for name, params in containers.items():
        assert labels(params) == LABELS, name
        again = labels(
            params,
            rules=Rule("up/kernel", None),
            param_labels={"up": {"kernel": "mine"}, "embed": None, "up/bias": None}
            | {"up": {"kernel": "mine", "bias": None}},
        )
        assert again == LABELS | {"up/kernel": "mine"}, name
    assert labels([layer, (layer,)]) == {
        "0/bias": "adamw",
        "0/kernel": "muon",
        "1/0/bias": "adamw",
        "1/0/kernel": "muon",
    }


def test_paths_drop_boxes_but_keep_a_module_called_value():
    from flax import nnx

    attention = nnx.eval_shape(lambda: nnx.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0), decode=False))
    state = nnx.state(attention, nnx.Param)
    assert "value/kernel" in leaf_paths(state)
    assert not any(path.endswith("/value") for path in leaf_paths(state))
    import flax.linen as nn

    boxed = {"a": {"kernel": nn.Partitioned(s(4, 8), ("embed", "mlp"))}}
    assert leaf_paths(boxed) == ["a/kernel"]


def test_trees_come_back_in_the_container_of_the_params():
    import flax.linen as nn
    from flax import nnx

    state = nnx.state(nnx.eval_shape(lambda: nnx.Linear(4, 8, rngs=nnx.Rngs(0))), nnx.Param)
    boxed = flax.core.freeze({"a": {"kernel": nn.Partitioned(s(4, 8), ("embed", "mlp"))}})
    for params in (state, boxed, TREE, Pair(TREE["up"], None)):
        for tree in (param_labels(params), matrix_views(params)):
            as_leaf = lambda x: x is None or isinstance(x, MatrixView)
            assert len(jax.tree.leaves(tree, is_leaf=as_leaf)) >= len(jax.tree.leaves(params))
        assert jax.tree.structure(param_labels(params)) == jax.tree.structure(params)


def test_holes_and_leaves_that_nobody_trains():
    params = {
        "a": {"kernel": s(4, 8)},
        "none": None,
        "masked": optax.MaskedNode(),
        "step": s(dtype=jnp.int32),
        "table": s(3, 4, 5, dtype=jnp.int8),
        "flag": s(4, 4, dtype=bool),
        "key": jax.eval_shape(lambda: jax.random.key(0)),
        "zero": np.zeros((4, 4), jax.dtypes.float0),
        "number": 1.5,
        "count": 3,
        "empty": s(0, 4),
        "hollow": s(0, 4, 4),
    }
    got = labels(params)
    assert got.pop("a/kernel") == "muon"
    adamw = {"number", "empty", "hollow"}
    assert {path for path, label in got.items() if label == "adamw"} == adamw
    assert {label for path, label in got.items() if path not in adamw} == {"frozen"}


def test_placeholders_and_empty_trees_are_quiet():
    rule = Rule("nothing/here", None)
    assert decide({}, rule) == decide(None, rule) == decide({"a": None}, rule) == ()
    assert optax.tree.map_params(  # the label function meets a placeholder
        optax.multi_transform({"muon": optax.trace(0.9), "adamw": optax.adamw(1.0)}, param_labels),
        lambda x: x,
        optax.multi_transform({"muon": optax.trace(0.9), "adamw": optax.adamw(1.0)}, param_labels).init(
            {"up": {"kernel": jnp.zeros((4, 4))}}
        ),
    )


def test_decisions_are_the_same_for_arrays_structs_and_tracers():
    arrays = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), TREE)
    traced = []
    jax.jit(lambda p: traced.append(decide(p)))(arrays)
    assert decide(arrays) == decide(TREE) == traced[0]
    assert hash(decide(TREE))


# ------------------------------------------------------------------------------------------------ rules


def test_first_rule_that_matches_wins():
    view = MatrixView(1, 0)
    rules = [Rule(".*/kernel", view, "mine"), Rule("up/.*", "slow"), Rule("embed/embedding", "muon")]
    decisions = {d.path: d for d in decide(TREE, rules)}
    assert decisions["up/kernel"].view == view.resolve((4, 8))
    assert (decisions["up/kernel"].rule, decisions["up/kernel"].because) == (".*/kernel", "mine")
    assert decisions["up/bias"].label == "slow"
    assert decisions["embed/embedding"].view == MatrixView((0,), (1,))
    assert labels(TREE, rules=rules[0]) == labels(TREE, rules=rules[:1])  # keras-team/keras #21079


def test_fused_kernels_are_cut_by_a_rule():
    params = {"attn": {"qkv": {"kernel": s(16, 48)}}}
    rule = Rule(".*/qkv/kernel", MatrixView(0, 1, contiguous_blocks(1, (16, 16, 16))))
    (decision,) = decide(params, rule)
    assert [m.count for m in decision.view.matrix_shapes((16, 48))] == [3]
    rule = Rule(".*/qkv/kernel", MatrixView(0, 1, contiguous_blocks(1, (16, 16))))
    with pytest.raises(ValueError, match=r"`attn/qkv/kernel` has shape .* sum to 32, the axis has 48"):
        decide(params, rule)


def test_bad_rules_raise_at_construction():
    with pytest.raises(ValueError, match=r"no regular expression.*re\.escape"):
        Rule("(a", None)
    with pytest.raises(ValueError, match="label is empty"):
        Rule("a", "")
    with pytest.raises(Exception, match="assignment"):
        Rule("a", 3)
    with pytest.raises(Exception, match=r"rules|Rule"):
        decide(TREE, "up/kernel")


def test_patterns_run_once_per_tree(monkeypatch):  # keras-team/keras #23162
    calls = []
    compile_ = re.compile

    class Counting:
        def __init__(self, pattern):
            self.pattern = compile_(pattern)

        def fullmatch(self, text):
            calls.append(text)
            return self.pattern.fullmatch(text)

    monkeypatch.setattr(rules_module.re, "compile", Counting)
    rule = Rule("up/kernel", None, "counted")
    for _ in range(3):
        decide(TREE, rule, param_labels={"embed": "muon", "up": None})
    assert len(calls) == 3
    monkeypatch.undo()


def test_side_one_goes_to_adamw_unless_forced():  # vllm-project/speculators #821
    params = {"one": {"kernel": s(64, 1)}, "row": {"kernel": s(1, 64)}, "up": {"kernel": s(64, 64)}}
    assert labels(params) == {"one/kernel": "adamw", "row/kernel": "adamw", "up/kernel": "muon"}
    assert labels(params, rules=Rule("one/kernel", MatrixView(0, 1)))["one/kernel"] == "muon"
    assert labels(params, param_labels="muon")["one/kernel"] == "adamw"
    assert labels(params, param_labels=jax.tree.map(lambda _: "muon", params))["one/kernel"] == "muon"


def test_lists_with_names_apart():
    names = [
        "token/embeddings",
        "attention/query/kernel",
        "attention/attention_output/kernel",
        "norm/gamma",
        "n",
    ]
    params = [s(9, 16), s(16, 2, 4), s(2, 4, 16), s(16), s(dtype=jnp.int32)]
    rules = rules_from_names(names, params)
    decisions = decide(params, rules)
    assert [d.label for d in decisions] == ["adamw", "muon", "muon", "adamw", "frozen"]
    assert "attention/query/kernel" in decisions[1].because
    with pytest.raises(ValueError, match="2 names"):
        rules_from_names(["a", "b"], params)


# ---------------------------------------------------------------------------------------------- raising


def test_unmatched_leaves_raise_together_with_lines_to_paste():
    params = {"enc": {"foo": {"kernel": s(4, 5, 6)}, "bar": s(4, 5, 6, 7)}, "up": {"kernel": s(4, 8)}}
    with pytest.raises(ValueError) as error:
        decide(params)
    text = str(error.value)
    assert "`enc/foo/kernel` has shape (4, 5, 6) and matches no rule, so its matrix is unknown." in text
    assert "`enc/bar` has shape (4, 5, 6, 7)" in text
    assert "describe(params, rules=rules) lists every decision." in text
    pasted = re.findall(r"Add (Rule\(.*\)) to rules=, or (Rule\(.*, None\)) for AdamW", text)
    assert len(pasted) == 2
    for column, label in ((0, "muon"), (1, "adamw")):
        rules = [eval(lines[column]) for lines in pasted]
        got = labels(params, rules=rules)
        assert got == {"enc/bar": label, "enc/foo/kernel": label, "up/kernel": "muon"}


def test_a_label_settles_an_unmatched_leaf():  # MoonshotAI/Moonlight #37
    params = {"foo": s(4, 5, 6), "up": {"kernel": s(4, 8)}}
    for label in ("adamw", "frozen", "mine"):
        assert labels(params, param_labels={"foo": label, "up": None})["foo"] == label
    with pytest.raises(ValueError, match=r"`foo` has shape \(4, 5, 6\) and is labelled 'muon'.*Rule\("):
        decide(params, param_labels=jax.tree.map(lambda _: "muon", params))
    with pytest.raises(ValueError, match=r"`foo` has shape .* matches no rule"):
        decide(params, param_labels="muon")


def test_unmatched_matrices_are_muon_and_flagged():
    (decision,) = decide({"foo": s(4, 5)})
    assert (decision.label, decision.view, decision.flagged) == ("muon", MatrixView((0,), (1,)), True)
    assert not any(d.flagged for d in decide(TREE))


def test_complex_leaves_raise_unless_somebody_takes_them():
    params = {"a": s(4, 4, dtype=jnp.complex64), "up": {"kernel": s(4, 8)}}
    with pytest.raises(ValueError, match="`a` has dtype complex64"):
        decide(params)
    for label in ("adamw", "frozen", "mine"):
        assert labels(params, rules=Rule("a", label))["a"] == label
    with pytest.raises(ValueError, match="`a` has dtype complex64"):
        decide(params, rules=Rule("a", MatrixView(0, 1)))


def test_leaves_that_are_no_arrays_raise():  # patrick-kidger/equinox #364
    for leaf in (jax.nn.relu, "text"):
        with pytest.raises(TypeError, match=r"`act` is a .*eqx.filter\(model, eqx.is_inexact_array\)"):
            decide({"act": leaf})


# ----------------------------------------------------------------------------------------------- labels


def test_labels_as_tree_prefix_function_or_module():
    import equinox as eqx

    class Callable(eqx.Module):  # google-deepmind/optax #913
        up: typing.Any
        embed: typing.Any

        def __call__(self, x):
            raise AssertionError("a tree of labels is data")

    mine = {"embed/embedding": "mine", "up/bias": "adamw", "up/kernel": "muon"}
    for given in (
        {"embed": "mine", "up": None},
        flax.core.freeze({"embed": {"embedding": "mine"}, "up": None}),
        Callable(up=None, embed="mine"),
        lambda p: {"embed": "mine", "up": {"kernel": None, "bias": None}},
        {"embed": "mine", "up": "muon", "a static field": "muon"},
    ):
        assert labels(TREE, param_labels=given) == mine
    from flax import nnx

    state = nnx.State(
        {"embed": {"embedding": nnx.Param(s(9, 4))}, "up": {k: nnx.Param(v) for k, v in TREE["up"].items()}}
    )
    given = jax.tree.map(lambda x: "mine" if x.shape == (9, 4) else "adamw", state)  # google/flax #5372
    assert labels(TREE, param_labels=given, rules=Rule("up/kernel", "adamw")) == mine | {"up/kernel": "adamw"}
    with pytest.raises(ValueError, match=r"param_labels has no entry for `up/bias`"):
        decide(TREE, param_labels={"embed": "mine", "up": {"kernel": "muon"}})
    with pytest.raises(TypeError, match=r"param_labels: got True at `embed`"):
        decide(TREE, param_labels={"embed": True, "up": None})


def test_muon_above_leaves_reaches_the_matrices_and_no_others():  # ReaLLMASIC/ReaLLM-Forge #836
    params = {
        "body": {"kernel": s(4, 8), "bias": s(2, 8), "norm": {"scale": s(3, 8)}},
        "head": {"kernel": s(8, 2)},
    }
    got = labels(params, param_labels={"body": "muon", "head": "adamw"})
    assert got == {
        "body/bias": "adamw",
        "body/kernel": "muon",
        "body/norm/scale": "adamw",
        "head/kernel": "adamw",
    }
    with pytest.raises(ValueError, match=r"`body/bias` has shape \(2, 8\) and is labelled 'muon'"):
        decide(params, param_labels={"body": {"kernel": "muon", "bias": "muon", "norm": None}, "head": None})


def test_by_path_takes_bools_and_says_what_is_missing():
    mask = {"embed": True, "up": {"kernel": False, "bias": True}}
    is_bool = lambda x: isinstance(x, bool)
    assert by_path(mask, TREE, "weight_decay_mask", is_bool) == [True, True, False]
    assert by_path(True, TREE, "weight_decay_mask", is_bool) == [True] * 3
    assert by_path(flax.core.freeze(mask), TREE, "weight_decay_mask", is_bool) == [True, True, False]
    assert by_path(lambda p: mask, TREE, "weight_decay_mask", is_bool) == [True, True, False]
    with pytest.raises(ValueError, match="weight_decay_mask has no entry for `embed/embedding`"):
        by_path({"up": True}, TREE, "weight_decay_mask", is_bool)


def test_decay_leaves_out_norms_and_biases():
    params = {
        "norm": {"scale": s(4), "bias": s(4)},
        "attn": {"query": {"kernel": s(8, 2, 4), "bias": s(2, 4)}},
        "embed": {"embedding": s(9, 8)},
        "layers": {"ln": s(6, 8)},
    }
    assert {d.path for d in decide(params) if decays(d)} == {"attn/query/kernel", "embed/embedding"}


# --------------------------------------------------------------------------------------------- warnings


def test_a_rule_that_matches_nothing_warns_once():
    rule = Rule("decoder/.*", None)
    with pytest.warns(UserWarning, match=r"Rule\('decoder/\.\*'\) matches no leaf.*`embed/embedding`"):
        decide(TREE, rule)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decide(TREE, rule)
        decide(TREE | {"masked": optax.MaskedNode()}, Rule("masked/.*", None))


def test_no_muon_leaf_warns_where_there_are_hidden_matrices():
    with pytest.warns(UserWarning, match="No leaf gets Muon, although `up/kernel`"):
        decide(TREE, param_labels="adamw")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decide({"embed": {"embedding": s(9, 4)}, "norm": {"scale": s(4)}})
        decide(TREE | {"hole": optax.MaskedNode()}, param_labels=lambda p: "frozen")
        decide(TREE, param_labels={"embed": None, "up": "slow_muon"})


def test_one_array_under_two_rules_warns():
    table = jnp.zeros((9, 9))
    with pytest.warns(UserWarning, match=r"`embed/embedding` and `up/kernel` are one array"):
        decide({"embed": {"embedding": table}, "up": {"kernel": table}})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decide(
            {"embed": {"embedding": table}, "lm_head": {"kernel": table}, "up": {"kernel": jnp.ones((9, 9))}}
        )


# --------------------------------------------------------------------------------------- ambiguous stacks


@pytest.mark.parametrize(
    ("shapes", "axis", "flagged"),
    [
        ({"up": (4, 8, 8)}, 0, False),  # what a scan reads it also writes
        ({"up": (64, 4, 64)}, 1, False),
        ({"up": (4, 8, 16)}, 0, True),
        ({"up": (16, 4, 8)}, 1, True),
        ({"up": (9, 4, 8), "down": (9, 8, 4)}, 0, False),
        ({"up": (4, 9, 8), "down": (8, 9, 4)}, 1, False),
        ({"up": (3, 4, 8), "down": (3, 8, 2)}, 0, False),  # an ensemble
        ({"up": (4, 3, 8), "down": (8, 3, 2)}, 1, False),
    ],
)
def test_layer_axis_of_stacks(shapes, axis, flagged):
    params = {"layers": {name: {"kernel": s(*shape)} for name, shape in shapes.items()}}
    for decision in decide(params):
        assert decision.view.batch_axes(3) == (axis,)
        assert decision.flagged == flagged


def test_stacks_of_different_depth_are_not_one_scan():
    for width in (8, 16):
        decisions = decide({"a": {"up": {"kernel": s(4, 8, width)}}, "b": {"up": {"kernel": s(6, 8, width)}}})
        assert [d.view.batch_axes(3) for d in decisions] == [(0,), (0,)]


def test_layers_named_on_a_third_axis_do_not_reach_other_leaves():
    import flax.linen as nn

    boxed = nn.Partitioned(s(8, 6, 3), ("embed", "mlp", "layers"))
    for shape in ((3, 4, 6), (4, 6, 3)):
        params = {"other": {"kernel": boxed, "bias": s(3, 6)}, "q": {"lora_b": s(*shape)}}
        decisions = {d.path: d for d in decide(params)}
        assert decisions["other/kernel"].view == MatrixView((0,), (1,))
        assert len(decisions["q/lora_b"].view.batch_axes(3)) == 1


def test_mesh_axis_names_are_no_logical_names():
    import flax.linen as nn

    params = {"query": {"kernel": nn.Partitioned(s(16, 4, 8), ("data", None, "model"))}}
    (decision,) = decide(params)
    assert decision.view == MatrixView((0,), (1, 2))


def test_axis_names_decide_what_paths_cannot():
    import flax.linen as nn

    def boxed(shape, *names):
        return nn.LogicallyPartitioned(s(*shape), names)

    params = {
        "mix": {"w": boxed((16, 6, 4, 8), "embed", "layers", "heads", "kv")},
        "unmix": {"w": boxed((4, 6, 8, 16), "heads", "layers", "kv", "embed")},
        "moe": {"foo": boxed((8, 6, 16, 32), "exp", "layers", "embed", "mlp")},
        "route": {"foo": boxed((16, 8), "embed", "expert")},
        "norm": {"w": boxed((16, 6), "norm", "layers")},
        "to_tokens": {"w": boxed((16, 99), "embed", "vocab")},
        "tokens": {"foo": boxed((99, 16), "vocab", "embed")},
    }
    got = {d.path: (d.label, d.role, d.view and d.view.matrix_shapes(d.shape)[0]) for d in decide(params)}
    shapes = {p: (v.count, v.fan_in, v.fan_out) for p, (label, _, v) in got.items() if label == "muon"}
    assert shapes == {
        "mix/w": (6, 16, 32),
        "unmix/w": (6, 32, 16),
        "moe/foo": (48, 16, 32),
        "route/foo": (1, 16, 8),
    }
    assert {p: role for p, (label, role, _) in got.items() if label == "adamw"} == {
        "norm/w": "norm",
        "to_tokens/w": "head",
        "tokens/foo": "embedding",
    }


def test_nnx_axis_names():
    from flax import nnx

    kernel = nnx.Param(s(6, 16, 32))
    kernel.set_metadata(out_sharding=("layers", "embed", "mlp"))
    (decision,) = decide(nnx.State({"foo": {"bar": kernel}}))
    assert decision.view == MatrixView((1,), (2,))


def test_two_leaves_with_one_path_raise():
    params = {"a/b": jnp.zeros((4, 8)), "a": {"b": jnp.zeros((8, 4))}}
    with pytest.raises(ValueError, match=r"`a/b` is the path of two leaves, of shapes \(8, 4\) and \(4, 8\)"):
        decide(params)
    with pytest.raises(ValueError, match="path of two leaves"):
        muon(1e-2).init(params)


def test_leaves_within_one_box_have_paths_of_their_own():
    box = nn.Partitioned((jnp.zeros((4, 8)), jnp.zeros((8, 2))), names=(None, None))
    assert [d.path for d in decide({"pair": box})] == ["pair/0", "pair/1"] == leaf_paths({"pair": box})
    assert [d.shape for d in decide({"pair": box})] == [(4, 8), (8, 2)]
