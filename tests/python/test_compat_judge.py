"""tests/compat/judge.py: what it makes of runs of PyTorch's suite."""

import json
import pathlib
import subprocess
import sys

import pytest

COMPAT = pathlib.Path(__file__).resolve().parents[1] / "compat"
sys.path.insert(0, str(COMPAT))
import judge  # noqa: E402

EXPECTED = """
[[listed]]
outcome = "fails"
kind = "internals"
reason = "reads a private attribute"
tests = ["test_a.T.private", "test_a.T.mended"]

[[listed]]
outcome = "skips"
kind = "device"
reason = "needs 4 ranks"
tests = ["test_b.T.large"]

[[listed]]
outcome = "any"
kind = "unmeasured"
reason = "torch's own functions"
tests = ["test_b.T.vacuous"]
"""
TWO_RANKS = {"which": "fsdp2", "files": {
    "test_a.py": {"T.good": {"outcome": "ok"}, "T.mended": {"outcome": "timeout"},
                  "T.private": {"outcome": "error", "exc": "AttributeError", "reason": "x"}},
    "test_b.py": {"T.large": {"outcome": "skip", "reason": "needs 4 ranks"}, "T.vacuous": {"outcome": "ok"}},
}}


def run(tmp_path, *runs, expected=EXPECTED):
    (tmp_path / "expected.toml").write_text(expected)
    for i, each in enumerate(runs):
        (tmp_path / f"{i}.json").write_text(json.dumps(each))
    ran = subprocess.run(
        [sys.executable, COMPAT / "judge.py", "--expected", tmp_path / "expected.toml", "--report",
         tmp_path / "report.md", *(tmp_path / f"{i}.json" for i in range(len(runs)))], capture_output=True, text=True)
    return ran.returncode, ran.stdout.splitlines(), (tmp_path / "report.md").read_text()


def changed(file, test, outcome, **more):
    files = {name: dict(tests) for name, tests in TWO_RANKS["files"].items()}
    files[file][test] = {"outcome": outcome, **more}
    return {"which": "fsdp2", "files": files}


def test_what_is_listed_counts_as_skipped(tmp_path):
    code, lines, report = run(tmp_path, TWO_RANKS)
    assert code == 0 and lines == ["1 passed, 0 failed, 4 skipped"]
    assert "| test_a | 1 | 0 | 2 |" in report and "| test_b | 0 | 0 | 2 |" in report
    assert "reads a private attribute: `test_a.T.mended`, `test_a.T.private`" in report


def test_a_failure_that_is_not_listed_is_unexpected(tmp_path):
    code, lines, report = run(tmp_path, changed("test_a.py", "T.good", "fail", exc="AssertionError", reason="1 != 2"))
    assert code == 1 and lines[-1] == "0 passed, 1 failed, 4 skipped"
    assert lines[0] == "unexpected: test_a.T.good fails, and is not listed: AssertionError 1 != 2"
    assert "1 != 2" in report


@pytest.mark.parametrize("file, test, outcome, says", [
    ("test_a.py", "T.mended", "ok", "passes, and is listed as one that fails"),
    ("test_b.py", "T.large", "fail", "fails, and is listed as one that skips"),
    ("test_a.py", "T.private", "vacuous", "skips, and is listed as one that fails"),
    ("test_a.py", "T.good", "skip", "skips, and is not listed"),
])
def test_another_outcome_than_the_listed_one_is_unexpected(tmp_path, file, test, outcome, says):
    code, lines, _ = run(tmp_path, changed(file, test, outcome))
    assert code == 1 and says in lines[0] and lines[-1].split(", ")[1] == "1 failed"


def test_a_listed_test_that_is_gone_is_unexpected(tmp_path):
    files = {"test_a.py": TWO_RANKS["files"]["test_a.py"]}
    code, lines, _ = run(tmp_path, {"which": "fsdp2", "files": files})
    assert code == 1 and lines[-1] == "1 passed, 2 failed, 2 skipped"
    assert lines[0] == "unexpected: test_b.T.large is listed, and was not run"


def test_a_run_on_more_ranks_says_what_fewer_skipped(tmp_path):
    on_four = {"which": "fsdp2", "files": {"test_b.py": {"T.large": {"outcome": "ok"}}, "test_a.py": {"T.good": {"outcome": "fail"}}}}
    code, lines, _ = run(tmp_path, TWO_RANKS, on_four)
    assert code == 1 and lines[0].startswith("unexpected: test_b.T.large passes, and is listed as one that skips")
    assert lines[-1] == "1 passed, 1 failed, 3 skipped"  # what two ranks ran stands


def test_a_list_that_is_wrong_is_refused():
    with pytest.raises(ValueError, match="listed twice: test_a.T.private"):
        judge.read_expected(EXPECTED.replace("test_a.T.mended", "test_a.T.private"))
    with pytest.raises(ValueError, match="not a listing"):
        judge.read_expected(EXPECTED.replace('"device"', '"tired"'))


@pytest.mark.parametrize("suite", judge.SUITES)
def test_the_projects_own_lists_are_well_formed(suite):
    assert judge.read_expected((COMPAT / f"expected_{suite}.toml").read_text())
