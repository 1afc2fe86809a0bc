"""All-gather and reduce-scatter by size: each engine, and memory copied for comparison."""

import contextlib
import os
import statistics

from ..bench import MPIRUN, has_mpi

#: engine -> what starts its ranks, where they do not start one by one
ENGINES = {"gloo": None, "shm": None, "mpi": MPIRUN}
OPS = ["all_gather", "reduce_scatter"]
RANKS = 2
BYTES = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]  # of a rank's part
ROUNDS = 5
ROUND_US = 2e5  # what a round is meant to last


def measure(bench):
    if bench.step_bench is None:
        return []
    program = os.path.join(os.path.dirname(bench.step_bench), "collective_bench")
    sizes, rounds = (BYTES[:2], 2) if bench.quick else (BYTES, ROUNDS)
    with contextlib.ExitStack() as stack:
        groups = {}
        for engine, launcher in ENGINES.items():
            if launcher and not has_mpi(program):
                continue
            groups[engine] = stack.enter_context(bench.start_program(
                [program], f"collectives.{engine}", ranks=RANKS, launcher=launcher, engine=engine, world=RANKS))
        sides = {**{engine: (group, "run") for engine, group in groups.items()}, "shm_own": (groups["shm"], "run_own"),
                 "memcpy": (groups["shm"], "copy")}
        return [_row(sides, op, size, rounds) for op in OPS for size in sizes]


def _row(sides, op, size, rounds):
    """Sides take turns; a round's time is its slowest rank's, the row's the median of the rounds."""
    counts = {}
    for side, (group, command) in sides.items():
        once = max(reply["us"] for reply in group.ask(command, op, size, 3))
        counts[side] = max(3, min(10_000, int(ROUND_US / once)))
    times = {side: [] for side in sides}
    for _ in range(rounds):
        for side, (group, command) in sides.items():
            times[side].append(max(reply["us"] for reply in group.ask(command, op, size, counts[side])))
    row = {"op": op, "bytes": size, "ranks": RANKS, "mpi_us": None}  # where there is no MPI
    return row | {f"{side}_us": statistics.median(each) for side, each in times.items()}
