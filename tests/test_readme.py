"""The README's code runs, in order, in one namespace; and its commands are the ones CI calls."""

import pathlib
import re

import pytest

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
    import optax_muon

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
