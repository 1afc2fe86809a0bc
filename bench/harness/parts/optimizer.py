"""AdamW on plain tensors, on FSDP2's parameters and on libfsdp's; and a whole step of a model of many tiny groups."""

from statistics import median

from ..bench import SIDES, references
from ..rounds import interleave, verify

NAMES = ["plain", "fsdp2", "libfsdp_python"]
RANKS = 2
LEARNS = 3  # steps on the joined batch between two verifications


def measure(bench):
    width, layers, norms = (16, 2, 8) if bench.quick else (64, 8, 200)
    blocks = dict(model="block", width=width, layers=layers, batch=1, seq=8)
    section = [measure_row(bench, f"adamw {kind}", "optimizer_us", ["--adamw", kind], blocks)
               for kind in ("foreach", "fused")]
    # Case 16 of docs/cases.md: every LayerNorm a group of its own.
    tiny = dict(model="norms", width=8, layers=norms, batch=1, seq=2)
    section.append(measure_row(bench, f"step of {norms} LayerNorms", "us", ["--adamw", "default", "--time-adamw"], tiny))
    return section


def measure_row(bench, what, clock, flags, config):
    rounds, warmup, steps = (1, 1, 1) if bench.quick else (7, 2, 5)
    label = "." + what.replace(" ", "_")
    with bench.sides(NAMES, ranks=RANKS, label=label, flags=flags, **config) as groups:
        verify(groups, references(groups))
        for group in groups.values():
            group.ask("learn", LEARNS)
        checked = verify(groups, references(groups))  # of the weights that the optimizer made
        times = interleave(groups, rounds, warmup, steps, clock)
    row = {"what": what, "ranks": RANKS, **config, "rounds": rounds, "steps": steps,
           "engines": {side: SIDES[side][3] for side in groups}}
    row |= {f"{side.removesuffix('_python')}_ms": median(times[side]) / 1e3 if side in times else None for side in NAMES}
    row["over_plain"] = {side: median(s / p for s, p in zip(times[side], times["plain"])) for side in references(times)}
    row["rounds_ms"] = {side: [us / 1e3 for us in rounds_us] for side, rounds_us in times.items()}
    row["values"] = checked
    return row
