"""Peak resident memory of a rank that trains 200 M parameters with AdamW, and what all ranks have together (PSS)."""

NAMES = ["plain", "ddp", "fsdp2", "cpp_plain", "libfsdp_cpp", "libfsdp_inplace"]
RANKS = 2
STEPS = 4


def measure(bench):
    width, layers = (64, 2) if bench.quick else (1024, 16)
    config = dict(model="block", width=width, layers=layers, batch=1, seq=64)
    section = {"ranks": RANKS, "optimizer": "AdamW", "steps": STEPS, "width": width, "blocks": layers, "sides": {}}
    for side in filter(bench.has, NAMES):
        ranks = 1 if side.endswith("plain") else RANKS
        with bench.start(side, ranks=ranks, label=".memory", flags=["--adamw", "default"], **config) as group:
            group.ask("round", 0, STEPS)
            replies = group.ask("memory")
            section["parameters"] = max(section.get("parameters", 0), group.ready[0]["parameters"])
        worst = {key: max(reply[key] for reply in replies) for key in replies[0]}
        section["sides"][side] = worst
        section[f"{side}_pss_mb"] = sum(reply["pss_mb"] for reply in replies)
        section[f"{side}_mb"] = max(worst["build_peak_mb"], worst["peak_mb"])
        section[f"{side}_training_mb"] = worst["peak_mb"]
    return section
