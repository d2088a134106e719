"""The public names and their arguments, pinned: a changed line in the snapshot is a change of the interface.

`python tests/test_signatures.py > tests/data/signatures.txt` (with the repository on the path) writes it anew.
"""

import inspect
import pathlib

import pytest

import optax_muon

SNAPSHOT = pathlib.Path(__file__).parent / "data" / "signatures.txt"
MODULES = ("recipes", "checkpoints", "diagnostics", "shape_factors")


def members(module):
    """Public functions and classes of a module: its `__all__`, else what it defines itself."""
    here = lambda x: callable(x) and getattr(x, "__module__", None) == module.__name__
    names = getattr(module, "__all__", None) or [
        n for n, x in vars(module).items() if n[0] != "_" and here(x)
    ]
    return {name: getattr(module, name) for name in names}


def public() -> dict:
    found = {}
    for name in optax_muon.__all__:
        x = getattr(optax_muon, name)
        found |= {f"{name}.{k}": v for k, v in members(x).items()} if name in MODULES else {name: x}
    return found


def arguments(x) -> str:
    """Names and kinds of the arguments; defaults are documented, and may get better."""
    if not callable(x):
        return ""
    none = inspect.Parameter.empty
    kept = [p.replace(annotation=none, default=none) for p in inspect.signature(x).parameters.values()]
    given = [p.default is not none for p in inspect.signature(x).parameters.values()]
    text = str(inspect.Signature(kept))
    for p, has_default in zip(kept, given, strict=True):
        if has_default:
            text = text.replace(f"{p.name},", f"{p.name}=,").replace(f"{p.name})", f"{p.name}=)")
    return text


def lines() -> list[str]:
    return [f"{name}{arguments(x)}" for name, x in sorted(public().items())]


def test_the_interface_is_the_one_in_the_snapshot():  # unslothai/unsloth #5933
    assert lines() == SNAPSHOT.read_text().splitlines()


@pytest.mark.parametrize("name", sorted(n for n, x in public().items() if inspect.isfunction(x)))
def test_optimizers_take_one_argument_by_position(name):  # unslothai/unsloth #5933
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(public()[name]).parameters.values()
    count = sum(p.kind in positional for p in parameters)
    if name in ("muon", "scale_by_muon", "scale_by_shape", "scale_by_normuon") or name.startswith("recipes."):
        assert count <= 1
    else:
        assert count <= 4


if __name__ == "__main__":
    print("\n".join(lines()))
