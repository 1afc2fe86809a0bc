"""A whole step (forward, backward, zero_grad; in some rows AdamW) on real ranks."""

from dataclasses import dataclass
from statistics import median

from ..bench import SIDES, references
from ..rank_group import BenchError
from ..rounds import interleave, verify

NAMES = ["plain", "cpp_plain", "ddp", "fsdp2", "libfsdp_cpp", "libfsdp_mpi", "libfsdp_shm", "libfsdp_inplace",
         "libfsdp_python", "libfsdp_python_inplace", "libfsdp_classic"]


@dataclass
class Case:
    width: int
    blocks: int
    batch: int
    steps: int  # in a round
    ranks: int = 2
    adamw: bool = False  # a fused one, in the timed part
    rounds: int = 3


CASES = [Case(64, 8, 2, 20, rounds=5), Case(512, 8, 2, 6, rounds=5), Case(1024, 4, 4, 4, rounds=5),
         Case(512, 8, 2, 6, adamw=True), Case(1024, 4, 4, 4, adamw=True),
         Case(64, 8, 2, 20, ranks=4), Case(512, 8, 2, 6, ranks=4), Case(1024, 2, 4, 4, ranks=4)]
QUICK_CASES = [Case(64, 2, 2, 2, rounds=1), Case(64, 2, 2, 2, adamw=True, rounds=1)]


def measure(bench):
    """Of the rows that can be measured: a side that dies costs its row alone."""
    entries = []
    for case in QUICK_CASES if bench.quick else CASES:
        if not any(text in title(vars(case)) for text in bench.rows):
            continue
        try:
            entries.append(measure_case(bench, case))
        except BenchError as error:
            bench.failures.append(f"step, {title(vars(case))}: {error}")
            continue
        over = entries[-1]["over_plain"].items()
        print(f"{title(entries[-1])}, over plain:", *(f"{side} {ratio:.2f}" for side, ratio in over), flush=True)
    return entries


def measure_case(bench, case):
    config = dict(model="block", width=case.width, layers=case.blocks, batch=case.batch, seq=64)
    flags = ["--time-zero-grad"] + (["--adamw", "fused", "--time-adamw"] if case.adamw else [])
    label = f".{case.width}.{case.ranks}" + (".adamw" if case.adamw else "")
    with bench.sides(NAMES, ranks=case.ranks, label=label, flags=flags, **config) as groups:
        verify(groups, references(groups))
        if case.adamw:
            for group in groups.values():
                group.ask("learn", 2)
            checked = verify(groups, references(groups))  # of the weights that the optimizer made
        # The optimizer of a round steps each rank's plain model by its own input: no two sides agree after it.
        times = interleave(groups, case.rounds, 2, case.steps)
        if not case.adamw:
            checked = verify(groups, references(groups))  # after the rounds too: they must leave no trace
    entry = {"width": case.width, "ranks": case.ranks, "adamw": case.adamw,
             "engines": {side: SIDES[side][3] for side in groups}, "blocks": case.blocks, "batch": case.batch, "seq": 64,
             "rounds": case.rounds, "steps": case.steps}
    entry |= {f"{side}_ms": median(times[side]) / 1e3 if side in times else None for side in NAMES}
    entry["over_plain"] = {side: median(s / p for s, p in zip(times[side], times[plain]))
                           for side, plain in references(times).items()}
    entry["rounds_ms"] = {side: [us / 1e3 for us in rounds_us] for side, rounds_us in times.items()}
    entry["values"] = checked
    return entry


def title(entry):
    """Of a row: "width 512, 4 ranks, AdamW"."""
    return f"width {entry['width']}, {entry['ranks']} ranks" + (", AdamW" if entry["adamw"] else "")
