"""Each benchmark script runs at toy size and writes lines with machine, versions and command. No time is tested."""

import dataclasses
import json
import math
import pathlib
import runpy
import sys

import pytest

BENCHMARKS = pathlib.Path(__file__).parent / "benchmarks"
TOY = {
    "bench_collectives": ["--only", "--cpu", "--matrices", "2", "32", "64", "--rounds", "1"],
    "bench_import": ["--rounds", "1"],
    "bench_loss": ["--sizes", "toy", "--at-most", "1"],
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


@pytest.fixture
def loss(tmp_path, monkeypatch):
    """bench_loss with an own folder for its records, and a loss that costs nothing instead of training."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench_loss

    def cost(run) -> float:
        best = {"adamw": 2e-3, "muon": 16e-3}.get(run.optimizer, 8e-3)
        rate = math.log2(run.learning_rate / best) ** 2
        decay = math.log10(run.weight_decay + 1e-3) ** 2
        return rate + decay + 100 / run.steps + run.seed / 100 - (run.optimizer == "muon") + run.b2

    measured = []

    def measure(run, corpus):
        measured.append(run)
        return {
            "run": dataclasses.asdict(run),
            "final_loss": cost(run),
            "curve": [[1, cost(run) + 1], [run.steps, cost(run)]],
            "hidden_parameters": 1,
            "state_bytes": 1,
            "seconds": 1.0,
            "tokens_per_step": 1,
            "corpus": {"name": corpus.name, "sha256": corpus.sha256},
            "flax": "0",
        }

    monkeypatch.setattr(bench_loss.record, "RECORDS", tmp_path)
    monkeypatch.setattr(bench_loss, "measure", measure)
    monkeypatch.setattr(bench_loss, "measured", measured, raising=False)
    corpus = bench_loss.corpora.Corpus("text", [], [], 256, "0" * 64)
    monkeypatch.setattr(bench_loss, "corpus", corpus, raising=False)
    return bench_loss


def test_a_killed_sweep_goes_on_where_it_was(loss):
    go = lambda at_most: loss.go("small", loss.STAGES, 400, loss.corpus, at_most=at_most)
    assert go(5) == 5
    assert loss.go("small", loss.STAGES, 400, loss.corpus, seeds=[0], at_most=30) == 30
    assert {run.seed for run in loss.measured} == {0}
    rest = 30 + go(math.inf)
    assert rest > 20
    assert go(math.inf) == 0
    assert len(loss.measured) == len(set(loss.measured)) == 5 + rest


def test_another_corpus_is_not_mixed_in(loss):
    loss.go("small", loss.STAGES, 400, loss.corpus, at_most=1)
    other = dataclasses.replace(loss.corpus, sha256="1" * 64)
    with pytest.raises(SystemExit, match="another corpus"):
        loss.go("small", loss.STAGES, 400, other, at_most=1)


def test_sweeps_are_equal_in_number_and_end_inside(loss):
    loss.go("small", ["sweep"], 400, loss.corpus)
    runs = {name: [run for run in loss.measured if run.optimizer == name] for name in ("adamw", "muon")}
    assert len(runs["adamw"]) == len(runs["muon"])
    for name, best in {"adamw": 2e-3, "muon": 16e-3}.items():
        rates = {run.learning_rate for run in runs[name]}
        assert {best / 2, best, best * 2} <= rates


def test_report_of_a_whole_record_and_of_a_part(loss, tmp_path):
    import loss_picture
    import report_loss

    loss.go("small", loss.STAGES, 400, loss.corpus, at_most=3)
    assert "the sweep is unfinished" in report_loss.report(report_loss.load(tmp_path))
    loss.go("small", loss.STAGES, 400, loss.corpus)
    (evidence,) = report_loss.load(tmp_path)
    text = report_loss.report([evidence])
    # Muon is better by 1 at equal steps and the loss falls by 100/steps: 400 steps of AdamW are 80 of Muon.
    assert "more than 3.00" in text
    assert "small:" not in text.split("Not run: ")[1].split("\n")[0]
    # 1200 steps of AdamW do not reach Muon at 400.
    assert [ratio.bound for ratio in evidence.ratios("adamw")] == [">"] * 3
    loss_picture.draw([evidence]).savefig(tmp_path / "loss.png")


@pytest.mark.parametrize(
    ("goal", "steps", "bound"), [(2.0, 200.0, ""), (1.5, 200 * 2**0.5, ""), (3.5, 100, "<"), (0.5, 400, ">")]
)
def test_steps_to_a_loss(monkeypatch, goal, steps, bound):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import report_loss

    got, outside = report_loss.steps_to([(100, 3.0), (200, 2.0), (400, 1.0)], goal)
    assert got == pytest.approx(steps)
    assert outside == bound


def test_evidence_in_the_readme_is_the_record(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import report_loss

    readme = (BENCHMARKS.parents[1] / "README.md").read_text()
    shown = readme.split(report_loss.BEGIN)[1].split(report_loss.END)[0].strip()
    assert shown == report_loss.report(report_loss.load(report_loss.RECORDS))
