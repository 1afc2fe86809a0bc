#!/usr/bin/env python3
"""judge.py --expected expected.toml --report report.md RUN.json...: what runs of a suite say about libfsdp.

A run is what run_suite.py wrote; where several are given, a test that one skipped is what a later one says of it (the
same suite on more ranks). Each test that does not pass is listed in expected.toml with its reason. Whatever happens
otherwise, also a listed test that passes or is gone, is unexpected and fails.
"""

import argparse
import json
import sys
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

#: run_suite's name of a suite -> what it is.
SUITES = {"fsdp2": "FSDP2", "fsdp1": "classic FSDP"}

#: run_suite's outcome -> what may be expected
GROUPS = {"ok": "passes", "fail": "fails", "error": "fails", "timeout": "fails", "skip": "skips", "vacuous": "skips"}

KINDS = {
    "missing": "not there yet",
    "different": "done otherwise, on purpose",
    "internals": "tests the insides of torch's implementation",
    "api": "the API moved since the suite was written; torch's own fails too",
    "device": "needs an accelerator, or fails on CPU whatever is in place",
    "unmeasured": "passes with an implementation that refuses everything: not counted",
}


@dataclass(frozen=True)
class Listing:
    """Why a test does not pass. ``outcome``: fails, skips, or any (it measures nothing)."""

    outcome: str
    kind: str
    reason: str


@dataclass
class Verdict:
    """Tests by name. ``unexpected`` says what is wrong."""

    passed: list[str] = field(default_factory=list)
    listed: list[str] = field(default_factory=list)
    unexpected: dict[str, str] = field(default_factory=dict)

    def __str__(self):
        return f"{len(self.passed)} passed, {len(self.unexpected)} failed, {len(self.listed)} skipped"


def read_expected(text):
    """{test: Listing} of expected.toml. ValueError for a test that is listed twice, or a field that is wrong."""
    listings = {}
    for entry in tomllib.loads(text)["listed"]:
        listing = Listing(entry["outcome"], entry["kind"], entry["reason"])
        if listing.outcome not in ("fails", "skips", "any") or listing.kind not in KINDS or not listing.reason:
            raise ValueError(f"not a listing: {entry}")
        for test in entry["tests"]:
            if test in listings:
                raise ValueError(f"listed twice: {test}")
            listings[test] = listing
    return listings


def outcomes_of(runs):
    """{file.Class.test: run_suite's record} of several runs."""
    outcomes = {}
    for run in runs:
        for file, results in run["files"].items():
            for name, result in results.items():
                test = f"{file.removesuffix('.py')}.{name}"
                if test not in outcomes or GROUPS[outcomes[test]["outcome"]] == "skips":
                    outcomes[test] = result
    return outcomes


def judge(outcomes, listings):
    verdict = Verdict()
    for test, result in outcomes.items():
        found = GROUPS[result["outcome"]]
        said = " ".join(part for part in (result.get("exc", ""), result.get("reason", "")) if part)
        listing = listings.get(test)
        if listing is None and found == "passes":
            verdict.passed.append(test)
        elif listing is None:
            verdict.unexpected[test] = f"{found}, and is not listed: {said}"
        elif listing.outcome in (found, "any"):
            verdict.listed.append(test)
        else:
            verdict.unexpected[test] = f"{found}, and is listed as one that {listing.outcome}: {said}".rstrip(": ")
    for test in listings.keys() - outcomes.keys():
        verdict.unexpected[test] = "is listed, and was not run"
    return verdict


def report(verdict, listings, suite):
    """Markdown, the same for the same outcomes."""
    lines = [f"# PyTorch's {SUITES[suite]} suite on libfsdp", "", "Written by `make compat`; docs/compat.md says how to read it.",
             "", f"**{verdict}**", "", "| file | passed | failed | skipped |", "| --- | --- | --- | --- |"]
    counts = {column: Counter(test.split(".")[0] for test in tests) for column, tests in
              (("passed", verdict.passed), ("failed", verdict.unexpected), ("skipped", verdict.listed))}
    for file in sorted(set().union(*counts.values())):
        lines.append(f"| {file} | {' | '.join(str(counts[column][file]) for column in counts)} |")
    if verdict.unexpected:
        lines += ["", "## Unexpected", ""]
        lines += [f"- `{test}` {_one_line(why)}" for test, why in sorted(verdict.unexpected.items())]
    for kind, meaning in KINDS.items():
        tests = [test for test in verdict.listed if listings[test].kind == kind]
        if not tests:
            continue
        lines += ["", f"## {meaning[0].upper()}{meaning[1:]} ({len(tests)})", ""]
        for reason in dict.fromkeys(listings[test].reason for test in tests):
            named = ", ".join(f"`{test}`" for test in sorted(tests) if listings[test].reason == reason)
            lines.append(f"- {reason}: {named}")
    return "\n".join(lines) + "\n"


def _one_line(text):
    return " ".join(text.split())[:300]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--expected", type=Path, required=True)
    parser.add_argument("--report", type=Path, help="Markdown to write")
    parser.add_argument("runs", type=Path, nargs="+")
    given = parser.parse_args(arguments)
    listings = read_expected(given.expected.read_text())
    runs = [json.loads(run.read_text()) for run in given.runs]
    verdict = judge(outcomes_of(runs), listings)
    if given.report:
        given.report.write_text(report(verdict, listings, runs[0]["which"]))
    for test, why in sorted(verdict.unexpected.items()):
        print(f"unexpected: {test} {_one_line(why)}")
    print(verdict)
    return 1 if verdict.unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
