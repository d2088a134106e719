"""Every example runs from a checkout at toy size, trains, and says what Muon got."""

import importlib
import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
TOY_GPT = ("--width", "32", "--heads", "2", "--layers", "1", "--context", "32", "--sequences", "8")
TOY_MESH = ("--width", "32", "--heads", "4", "--layers", "1", "--context", "16", "--sequences", "8")


def run(name: str, *arguments: object, devices: int = 1) -> str:
    """The example's standard output; an example that needs packages which are not installed is skipped."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    command = [sys.executable, str(ROOT / "examples" / name), *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def muon_leaves(text: str) -> int:
    """How many leaves the printed description gives to Muon."""
    return int(re.search(r"^muon: (\d+) leaves", text, re.MULTILINE).group(1))


def test_gpt_compares_both_optimizers(tmp_path):
    out = run("train_gpt.py", *TOY_GPT, "--steps", 40, "--eval-batches", 2, "--out", tmp_path)
    assert muon_leaves(out) == 6  # query, key, value, out, up, down
    assert re.search(r"^Muon +\d\.\d{3}", out, re.MULTILINE)
    assert re.search(r"^AdamW +\d\.\d{3} +40 ", out, re.MULTILINE)
    record = json.loads((tmp_path / "train_gpt.json").read_text())
    assert len(record["corpus"]["sha256"]) == 64
    assert record["parameters"]["muon"] == 12 * 32**2
    assert {"jax", "flax", "optax", "python"} <= set(record["versions"])
    for name in ("adamw", "muon"):
        curve = [point["loss"] for point in record["runs"][name]["curve"]]
        assert len(record["runs"][name]["train_loss"]) == 40
        # The untrained loss is about ln(256) = 5.5. Measured at the end: 3.2 (both); bound 4.
        assert curve[-1] < 4 < curve[0]
    assert (tmp_path / "train_gpt.png").read_bytes().startswith(b"\x89PNG")


def test_gpt_on_tokens_of_the_user(tmp_path):
    tokens = tmp_path / "tokens.bin"
    np.random.default_rng(0).integers(500, size=4000).astype("<u2").tofile(tokens)
    out = run(
        "train_gpt.py", *TOY_GPT, "--optimizer", "muon", "--steps", 3, "--tokens", tokens, "--out", tmp_path
    )
    assert "vocabulary of 500" in out
    assert list(json.loads((tmp_path / "train_gpt.json").read_text())["runs"]) == ["muon"]


@pytest.fixture
def corpus(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("corpus")


def test_corpus_holds_out_whole_files(corpus):
    data = corpus.standard_library()
    assert data.sha256 == corpus.standard_library().sha256
    assert 0.05 < len(data.valid) / (len(data.train) + len(data.valid)) < 0.2
    files = {part: set(bytes(getattr(data, part)).split(b"\0")) for part in ("train", "valid")}
    assert not files["train"] & files["valid"]


def test_corpus_of_the_user(corpus, tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(100)))
    data = corpus.load([str(path)])
    assert data.train.tolist() == list(range(90))
    assert data.valid.tolist() == list(range(90, 100))
    windows = corpus.batch(data.train, 0, 7, sequences=4, context=5)
    assert windows.shape == (4, 6)
    assert (np.diff(windows) == 1).all()
    assert (windows == corpus.batch(data.train, 0, 7, sequences=4, context=5)).all()
    assert (windows != corpus.batch(data.train, 0, 8, sequences=4, context=5)).any()
    fixed = np.concatenate(list(corpus.fixed_batches(data.train, 2, 3, 5)))
    assert fixed[0, 0] == 0
    assert fixed[-1, -1] == 89
    with pytest.raises(ValueError, match="10 tokens has no window of context"):
        corpus.batch(data.valid, 0, 0, sequences=1, context=10)


@pytest.mark.parametrize(
    ("name", "leaves"), [("train_cnn_linen.py", 2), ("train_mlp_equinox.py", 3)], ids=("linen", "equinox")
)
def test_classifiers(tmp_path, name, leaves):
    out = run(name, "--steps", 40, "--learning-rate", 0.01, "--out", tmp_path)
    assert muon_leaves(out) == leaves
    runs = json.loads((tmp_path / name.replace(".py", ".json")).read_text())
    for run_ in runs.values():
        assert run_["final_loss"] < 0.5 * run_["first_loss"]
        assert run_["accuracy"] > 0.9  # measured 0.95 to 0.98


def test_pmap_trains_the_same_on_any_number_of_replicas():
    finals = {}
    for replicas in (1, 4):
        out = run("train_pmap.py", "--steps", 61, "--batch", 64 // replicas, devices=replicas)
        assert muon_leaves(out) == 3
        first, *_, last = (float(loss) for loss in re.findall(r"loss (\d+\.\d+)", out))
        assert last < 0.5 * first
        finals[replicas] = last
    # Same images in every step, only divided differently. Measured difference 0 at four digits.
    assert finals[1] == pytest.approx(finals[4], abs=2e-4)


@pytest.fixture(scope="module")
def one_run(tmp_path_factory):
    """Eight steps on a 4 x 2 mesh, nothing saved in between."""
    folder = tmp_path_factory.mktemp("whole")
    out = run(
        "train_gpt_sharded.py", *TOY_MESH, "--devices", 8, "--mesh", 4, 2, "--steps", 8, "--out", folder
    )
    assert muon_leaves(out) == 6
    return json.loads((folder / "train_gpt_sharded.json").read_text())["loss"]


def test_sharded_gpt_resumes_on_another_mesh(tmp_path, one_run):
    arguments = (*TOY_MESH, "--devices", 8, "--out", tmp_path)
    run("train_gpt_sharded.py", *arguments, "--mesh", 4, 2, "--steps", 4)
    run("train_gpt_sharded.py", *arguments, "--mesh", 2, 4, "--steps", 8, "--resume")
    record = json.loads((tmp_path / "train_gpt_sharded.json").read_text())
    assert record["first_step"] == 4
    np.testing.assert_allclose(record["loss"], one_run[4:], rtol=1e-4)


def test_sharded_gpt_in_two_processes_equals_one(tmp_path, one_run):
    arguments = (*TOY_MESH, "--devices", 8, "--mesh", 4, 2, "--steps", 8, "--out", tmp_path)
    run("train_gpt_sharded.py", *arguments, "--processes", 2)
    record = json.loads((tmp_path / "train_gpt_sharded.json").read_text())
    assert record["processes"] == 2
    np.testing.assert_allclose(record["loss"], one_run, rtol=1e-4)
