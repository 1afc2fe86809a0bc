"""AdamW on plain tensors, on FSDP2's parameters and on libfsdp's; and a whole step of a model of many tiny groups."""

import contextlib
from statistics import median

from ..bench import SIDES, references
from ..rounds import interleave, verify

#: side -> what its figure is called
NAMES = {"plain": "plain", "fsdp2": "fsdp2", "libfsdp_python": "libfsdp"}
#: fsdp::optim::AdamW, beside torch's foreach; the plain side of its language is there to verify it.
CPP_NAMES = {"cpp_plain": "cpp_plain_fused", "libfsdp_shm": "libfsdp_fused"}
RANKS = 2
LEARNS = 3  # steps on the joined batch between two verifications


def measure(bench):
    width, layers, norms = (16, 2, 8) if bench.quick else (64, 8, 200)
    blocks = dict(model="block", width=width, layers=layers, batch=1, seq=8)
    section = [measure_row(bench, f"adamw {kind}", "optimizer_us", ["--adamw", kind], blocks, cpp=kind == "foreach")
               for kind in ("foreach", "fused")]
    # Case 16 of docs/cases.md: every LayerNorm a group of its own.
    tiny = dict(model="norms", width=8, layers=norms, batch=1, seq=2)
    section.append(measure_row(bench, f"step of {norms} LayerNorms", "us", ["--adamw", "default", "--time-adamw"], tiny))
    return section


def measure_row(bench, what, clock, flags, config, cpp=False):
    rounds, warmup, steps = (1, 1, 1) if bench.quick else (7, 2, 5)
    label = "." + what.replace(" ", "_")
    with contextlib.ExitStack() as stack:
        groups = stack.enter_context(bench.sides(NAMES, ranks=RANKS, label=label, flags=flags, **config))
        if cpp:
            groups |= stack.enter_context(
                bench.sides(CPP_NAMES, ranks=RANKS, label=label, flags=["--adamw", "fused"], **config))
        verify(groups, references(groups))
        for group in groups.values():
            group.ask("learn", LEARNS)
        checked = verify(groups, references(groups))  # of the weights that the optimizer made
        times = interleave(groups, rounds, warmup, steps, clock)
    row = {"what": what, "ranks": RANKS, **config, "rounds": rounds, "steps": steps,
           "engines": {side: SIDES[side][3] for side in groups}}
    row |= {f"{name}_ms": median(times[side]) / 1e3 if side in times else None
            for side, name in (NAMES | CPP_NAMES).items()}
    row["over_plain"] = {side: median(s / p for s, p in zip(times[side], times["plain"]))
                         for side in times if side != "plain"}
    row["rounds_ms"] = {side: [us / 1e3 for us in rounds_us] for side, rounds_us in times.items()}
    row["values"] = checked
    return row
