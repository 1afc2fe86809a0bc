"""A whole step (forward, backward, zero_grad) on real ranks."""

from statistics import median

from ..bench import SIDES, references
from ..rounds import interleave, verify

NAMES = ["plain", "cpp_plain", "ddp", "fsdp2", "libfsdp_cpp", "libfsdp_shm", "libfsdp_inplace",
         "libfsdp_python", "libfsdp_python_inplace", "libfsdp_classic"]
RANKS = 2
#: width, blocks, batch, steps in a round
SIZES = [(64, 8, 2, 20), (512, 8, 2, 6), (1024, 4, 4, 4)]
QUICK_SIZES = [(64, 2, 2, 2)]


def measure(bench):
    rounds, warmup = (1, 1) if bench.quick else (7, 2)
    return [measure_size(bench, *size, rounds, warmup) for size in (QUICK_SIZES if bench.quick else SIZES)]


def measure_size(bench, width, layers, batch, steps, rounds, warmup):
    config = dict(model="block", width=width, layers=layers, batch=batch, seq=64)
    with bench.sides(NAMES, ranks=RANKS, label=f".{width}", flags=["--time-zero-grad"], **config) as groups:
        verify(groups, references(groups))
        times = interleave(groups, rounds, warmup, steps)
        checked = verify(groups, references(groups))  # after the rounds too: they must leave no trace
    entry = {"width": width, "ranks": RANKS, "engines": {side: SIDES[side][3] for side in groups}, "blocks": layers,
             "batch": batch, "seq": 64, "rounds": rounds, "steps": steps}
    entry |= {f"{side}_ms": median(times[side]) / 1e3 if side in times else None for side in NAMES}
    entry["over_plain"] = {side: median(s / p for s, p in zip(times[side], times[plain]))
                           for side, plain in references(times).items()}
    entry["rounds_ms"] = {side: [us / 1e3 for us in rounds_us] for side, rounds_us in times.items()}
    entry["values"] = checked
    return entry
