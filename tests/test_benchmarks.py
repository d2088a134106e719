"""Each benchmark script runs at toy size and writes lines with machine, versions and command. No time is tested."""

import json
import pathlib
import runpy
import sys

import pytest

BENCHMARKS = pathlib.Path(__file__).parent / "benchmarks"
TOY = {
    "bench_collectives": ["--only", "--cpu", "--matrices", "2", "32", "64", "--rounds", "1"],
    "bench_import": ["--rounds", "1"],
    "bench_compile": ["--rounds", "1", "--small", "6", "--layers", "1", "2"],
    "bench_step": ["--rounds", "1", "--sequences", "1"],
    "bench_update": ["--rounds", "1", "--trees", "toy"],
}


@pytest.mark.parametrize("name", TOY)
def test_script_runs_and_records(name, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "record", raising=False)
    import record

    monkeypatch.setattr(record, "RECORDS", tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *TOY[name]])
    runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
    (file,) = tmp_path.iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows
    for row in rows:
        assert {"benchmark", "date", "command", "device", "processor", "jax", "optax", "python"} <= set(row)
        assert name in row["command"]
    assert capsys.readouterr().out


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("records/*.jsonl")), ids=lambda p: p.stem)
def test_committed_records_say_how_they_were_made(path):
    for line in path.read_text().splitlines():
        assert {"command", "jax"} <= set(json.loads(line))
