#!/usr/bin/env python3
"""Measures plain, DDP, PyTorch FSDP2 and libfsdp side by side; see docs/benchmarks.md.

Writes report.json and the charts, prints the tables. Fails if a side dies or gives a wrong value; a missed aim is
shown, not asserted.
"""

import argparse
import glob
import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from harness import aims, charts, environment, tables  # noqa: E402
from harness.bench import Bench  # noqa: E402
from harness.parts import PARTS  # noqa: E402
from harness.rank_group import BenchError  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))


def find_step_bench(build):
    """The newest step_bench under `build`, or under the checkout's own build folders."""
    roots = [build] if build else glob.glob(os.path.join(HERE, "..", "build*"))
    found = [path for root in roots for path in glob.glob(os.path.join(root, "**", "step_bench"), recursive=True)
             if os.access(path, os.X_OK) and os.path.isfile(path)]
    if not found:
        sys.exit(f"compare.py: no step_bench under {', '.join(roots) or 'build*'}. Build the benchmarks first "
                 "(make bench does), name the build folder with --build, or leave C++ out with --torch-only.")
    return max(found, key=os.path.getmtime)


def find_package(step_bench):
    """The Python package of the same build, if that has one."""
    if step_bench is None:
        return None
    folder = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(step_bench))), "python")
    return folder if glob.glob(os.path.join(folder, "libfsdp", "_C*.so")) else None


def parse_args():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--quick", action="store_true", help="the smallest sizes, to see that it works; no figure counts")
    p.add_argument("--build", help="the build folder with the C++ programs")
    p.add_argument("--torch-only", action="store_true", help="leave the C++ sides out; their figures are null")
    p.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    p.add_argument("--rows", nargs="+", default=[""], help="of the part step, rows whose title has one of these in it: "
                                                           "'width 512', '4 ranks', 'AdamW'")
    p.add_argument("--out", default=os.path.join(HERE, "out"))
    return p.parse_args()


def main():
    args = parse_args()
    step_bench = None if args.torch_only else find_step_bench(args.build)
    bench = Bench(step_bench, find_package(step_bench), os.path.join(args.out, "logs"), args.quick, args.rows)
    os.makedirs(args.out, exist_ok=True)
    report = {"environment": environment.describe(), "quick": args.quick}
    print(tables.machine(report["environment"]), flush=True)
    path = os.path.join(args.out, "report.json")
    for part in args.parts:
        try:
            report[part] = PARTS[part].measure(bench)
        except BenchError as error:
            bench.failures.append(f"{part}: {error}")
            continue
        print(tables.PRINTERS[part](report[part]), flush=True)
        write(path, report)  # what there is, should a later part bring the machine down
    report["failures"] = bench.failures
    report["aims"] = [] if args.quick else aims.judge(report)
    print("Quick run: the aims are not judged.\n" if args.quick else tables.aims(report["aims"]))
    write(path, report)
    print("written:", *(os.path.relpath(p) for p in [path, *charts.draw(report, args.out)]), sep="\n  ")
    if bench.failures:
        sys.exit("compare.py: " + "\n".join(bench.failures))


def write(path, report):
    with open(path, "w") as f:
        json.dump(report, f, indent=1)


if __name__ == "__main__":
    main()
