"""Every public name says what it computes, takes, returns and raises, with an example; and the README lists it.

The parts are those of the docstring of `muon`. Examples run with the suite (`--doctest-modules` over
`optax_muon`), which is checked here too.
"""

import ast
import doctest
import inspect
import itertools
import pathlib
import re
import tomllib

import pytest

import optax_muon
from tests.test_signatures import public

ROOT = pathlib.Path(__file__).parent.parent
NAMES = public()
FUNCTIONS = sorted(n for n, x in NAMES.items() if inspect.isfunction(x))
CLASSES = sorted(n for n, x in NAMES.items() if inspect.isclass(x))
CONSTANTS = sorted(n for n, x in NAMES.items() if not callable(x))

# Functions that move, read or draw, and compute nothing that a paper describes.
PLUMBING = {
    *(n for n in FUNCTIONS if n.startswith(("checkpoints.", "rules_from_"))),
    *(
        "contiguous_blocks",
        "interleaved_blocks",
        "describe",
        "estimate_memory",
        "matrix_views",
        "param_labels",
    ),
    *("state_shardings", "diagnostics.latest", "diagnostics.record"),
    *("diagnostics.plot_history", "diagnostics.plot_spectra"),
}
# Of what is widely known, no source is asked.
KNOWN = {"diagnostics.cosine", "diagnostics.singular_values"}
# Numbers in, numbers out: no array has a shape.
WITHOUT_ARRAYS = {"polar_express", *(n for n in FUNCTIONS if n.startswith("shape_factors."))}
# What functions return; users do not make one.
RESULTS = {
    *("Description", "MemoryEstimate", "Muon", "ScaleByMuonState", "ScaleByNormuonState"),
    *("diagnostics.Measurements", "diagnostics.RecordState"),
    *("shape_factors.SqrtMax", "shape_factors.SqrtRatio", "shape_factors.SqrtRatioMinOne"),
}


def doc(name: str) -> str:
    return inspect.getdoc(NAMES[name]) or ""


def has_section(text: str, *titles: str) -> bool:
    return re.search(rf"^(?:{'|'.join(titles)}):", text, re.MULTILINE) is not None


def section(text: str, title: str) -> str:
    found = re.search(rf"^{title}:\n((?:[ \t]+.*\n?|\n)*)", text, re.MULTILINE)
    return found.group(1) if found else ""


def starred(parameter: inspect.Parameter) -> str:
    kinds = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return kinds.get(parameter.kind, "") + parameter.name


@pytest.mark.parametrize("name", [*FUNCTIONS, *CLASSES])
def test_the_first_sentence_stands_alone(name):
    summary = doc(name).split("\n\n")[0]
    assert summary
    assert len(summary) < 240
    assert summary.endswith("."), summary


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_document_every_part(name):
    text = doc(name)
    arguments = section(text, "Args")
    for parameter in inspect.signature(NAMES[name]).parameters.values():
        assert re.search(rf"^\s+{re.escape(starred(parameter))}: \S", arguments, re.MULTILINE), parameter
    assert section(text, "Returns").strip()
    assert re.search(r"\b[A-Z]\w+Error\b", section(text, "Raises")), "name what is raised"


@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - PLUMBING))
def test_what_computes_gives_formula_shape_dtype_and_source(name):
    text = doc(name)
    formula = r"\bFormula\b|\bNumbers:|`[^`]*[|√‖^*/(][^`]*`"
    assert re.search(formula, text), "give the formula"
    if name not in KNOWN:
        assert has_section(text, "References", "Source"), "name the source"
    if name not in WITHOUT_ARRAYS and not name.startswith(
        "recipes."
    ):  # a recipe returns what `muon` documents
        assert re.search(r"\[[*\w, ()]+\]|\bshapes?\b", text), "say which shapes"
        assert re.search(r"\bdtypes?\b|\b[Ff]loat(?:32|ing)\b|\bf32\b", text), "say which dtypes"


@pytest.mark.parametrize("name", CLASSES)
def test_classes_document_every_field(name):
    text = doc(name)
    for field in inspect.signature(NAMES[name]).parameters:
        assert re.search(rf"\b{field}\b", text), field
    for member, x in vars(NAMES[name]).items():
        function = x.fget if isinstance(x, property) else getattr(x, "__func__", x)
        if member[0] != "_" and inspect.isfunction(function):
            assert inspect.getdoc(function), member


@pytest.mark.parametrize("name", sorted({*FUNCTIONS, *CLASSES} - RESULTS))
def test_examples_are_found_by_the_doctest_run(name):
    x = NAMES[name]
    module = inspect.getmodule(x)
    assert module is not None
    finder = doctest.DocTestFinder(recurse=False)
    (found,) = finder.find(x, f"{module.__name__}.{x.__qualname__}", module)
    assert found.examples, "give an example"
    assert any(example.want for example in found.examples) or len(found.examples) > 1
    assert not any(doctest.SKIP in example.options for example in found.examples)
    assert pathlib.Path(module.__file__ or "").is_relative_to(ROOT / "optax_muon")


def test_the_suite_runs_docstrings():
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert "optax_muon" in options["testpaths"]
    assert "--doctest-modules" in options["addopts"]
    assert "--ignore=optax_muon" not in options["addopts"]


def test_constants_are_described():
    """By a string after the assignment, as editors show it."""
    described = set()
    for path in (ROOT / "optax_muon").rglob("*.py"):
        body = ast.parse(path.read_text()).body
        for statement, following in itertools.pairwise(body):
            if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(following, ast.Expr):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                is_text = isinstance(following.value, ast.Constant) and isinstance(following.value.value, str)
                described |= {t.id for t in targets if isinstance(t, ast.Name) and is_text}
    assert set(CONSTANTS) <= described


def test_the_readme_lists_the_interface():
    """Every public name stands in the table of the README, and nothing else does."""
    readme = (ROOT / "README.md").read_text()
    table = readme.split("<!-- api -->")[1]
    rows = [line.split("|")[2] for line in table.splitlines() if line.startswith("| ")][1:]
    listed = []
    for row in rows:
        prefix = ""
        for name in re.findall(r"`([\w.]+)`", row):
            prefix = f"{name.split('.')[0]}." if "." in name else prefix if f"{prefix}{name}" in NAMES else ""
            listed.append(name if "." in name else f"{prefix}{name}")
    assert sorted(listed) == sorted(NAMES)
    assert set(optax_muon.__all__) - set(NAMES) == {"checkpoints", "diagnostics", "recipes", "shape_factors"}
