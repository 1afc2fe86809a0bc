"""The work that sharding adds on the host: collectives that do nothing, layers that compute next to nothing."""

from statistics import median

from ..bench import references
from ..rounds import extra, interleave, verify

NAMES = ["plain", "fsdp2", "libfsdp_python", "cpp_plain", "libfsdp_cpp"]
WORLD = 8


def measure(bench):
    layers = 2 if bench.quick else 24
    rounds, warmup, steps = (1, 1, 2) if bench.quick else (7, 3, 20)
    config = dict(model="block", width=16, layers=layers, batch=2, seq=8)
    # The fake engine's values mean nothing: the same model shows its values on two real ranks.
    with bench.sides(NAMES, ranks=2, label=".values", **config) as groups:
        checked = verify(groups, references(groups))
    with bench.sides(NAMES, engine="fake", world=WORLD, label=".fake", **config) as groups:
        times = interleave(groups, rounds, warmup, steps)
        copies = groups["fsdp2"].ask("copies")[0]
    section = {"fsdp2_us": None, "libfsdp_cpp_us": None, "libfsdp_python_us": None, "blocks": layers, "parameters_per_block": 16, "width": 16,
               "batch": 2, "seq": 8, "engine": "fake", "ranks": WORLD, "rounds": rounds, "steps": steps,
               "values": checked, "values_checked_on": "2 gloo ranks"}
    # Of a block: gathered for forward and for backward, reduced once.
    section["fsdp2_fake_copies_us"] = 2 * copies["gather_us"] + copies["reduce_us"]
    for side, plain in references(times).items():
        section[f"{side}_us"] = extra(times, side, plain) / layers
        section[f"{side}_us_rounds"] = [(s - p) / layers for s, p in zip(times[side], times[plain])]
    for plain in ("plain", "cpp_plain"):
        if plain in times:
            section[f"{plain}_block_us"] = median(times[plain]) / layers
    return section
