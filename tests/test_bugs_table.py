"""The table of reported faults is complete, and every test that it names exists."""

import pathlib
import re

HERE = pathlib.Path(__file__).parent
ROWS = re.findall(r"^\| A-(\d+) \| (.+?) \| (.+) \|$", (HERE / "bugs.md").read_text(), re.MULTILINE)


def test_every_report_has_a_line():
    assert [int(number) for number, _, _ in ROWS] == list(range(1, 124))
    for number, thread, held in ROWS:
        assert re.search(r"\w+/[\w.-]+ (#\d+|[0-9a-f]{7})", thread), number
        assert "::test_" in held or held.startswith("Cannot arise"), number


def test_every_test_in_the_table_exists():
    named = {(file, test) for _, _, held in ROWS for file, test in re.findall(r"`(\S+)::(\w+)`", held)}
    assert len(named) > 100
    missing = [f"{f}::{t}" for f, t in named if not re.search(rf"def {t}\(", _text(f))]
    assert not missing


def _text(file):
    path = HERE / file
    return path.read_text() if path.exists() else ""
