"""What the figures are meant to be. An aim that is not met is shown as such; it fails nothing."""

from .parts.scale import GROUPS, by_shape
from .parts.step import title

#: Largest step overhead over Gloo, as a part of FSDP2's.
STEP_AIM = 0.60
#: Largest step over the plain step, on shared memory.
SHM_STEP_AIM = 1.15
SHM_STEP_WIDTHS = (512, 1024)


def aim(what, wanted, got, met):
    return {"what": what, "aim": wanted, "got": got, "met": bool(met)}


def at_most(what, limit, got):
    return aim(what, f"at most {limit:g}", got, got <= limit)


def at_least(what, limit, got):
    return aim(what, f"at least {limit:g}", got, got >= limit)


def host_cost(section):
    # A cost at or below zero is noise about none: the ratio is then without bound.
    found = []
    for side, least in (("libfsdp_cpp", 15), ("libfsdp_python", 10)):
        if section.get(f"{side}_us") is not None:
            ratio = section["fsdp2_us"] / max(section[f"{side}_us"], 1e-3)
            found.append(at_least(f"host cost: FSDP2 over {side}", least, ratio))
    return found


def step(entries):
    found = []
    for entry in entries:
        over, what = entry["over_plain"], f"step, {title(entry)}: "

        def ratio(side, of, name, limit):
            if side in over and of in over:
                found.append(at_most(what + name, limit, over[side] / over[of]))

        if "libfsdp_cpp" in over:
            part = (over["libfsdp_cpp"] - 1) / max(over["fsdp2"] - 1, 1e-6)
            found.append(at_most(what + "overhead over Gloo as a part of FSDP2's", STEP_AIM, part))
        for side, name in (("libfsdp_shm", "shared memory"), ("libfsdp_inplace", "shared memory in place")):
            if side in over and entry["width"] in SHM_STEP_WIDTHS:
                found.append(at_most(f"{what}{name} over plain", SHM_STEP_AIM, over[side]))
            ratio(side, "ddp", f"{name} over DDP", 1.0)
        ratio("libfsdp_classic", "libfsdp_python", "the classic wrapper over fully_shard", 1.0)
    return found


def scale(section):
    found = []
    by_groups = {point["groups"]: point for point in section["groups"]}
    few, many = GROUPS[0], GROUPS[-1]
    if few in by_groups and many in by_groups:
        for key, name in (("setup_us_per_group", "set-up"), ("host_us_per_group", "host cost")):
            found.append(at_most(f"scale: {name} per group, {many} groups over {few} (linear is 1)", 1.5,
                                 by_groups[many][key] / by_groups[few][key]))
    for (rows, columns), points in by_shape(section["worlds"]).items():
        limit = 2.0 if points[0]["most_shards_empty"] else 1.2
        for key, what in (("setup_us", "set-up"), ("host_us_per_group", "host cost")):
            found.append(at_most(f"scale: {what}, world {points[-1]['world']} over {points[0]['world']}, "
                                 f"parameters of {rows} x {columns}", limit, points[-1][key] / points[0][key]))
    return found


def collectives(rows):
    found = []
    for row in rows:
        name, size = row["op"].replace("_", "-"), row["bytes"]
        if size == 4 << 10:
            found.append(at_least(f"shm {name} of 4 KB: Gloo over it", 20, row["gloo_us"] / row["shm_us"]))
        elif size >= 1 << 20:
            limit = 1.3 if row["op"] == "all_gather" else 1.5
            found.append(at_most(f"shm {name} of {size >> 20} MB over memcpy", limit, row["shm_us"] / row["memcpy_us"]))
            if row["op"] == "all_gather":
                found.append(at_most(f"shm {name} of {size >> 20} MB from the channel's memory over memcpy", limit,
                                     row["shm_own_us"] / row["memcpy_us"]))
    return found


def optimizer(rows):
    found = []
    for row in rows:
        if (got := row["over_plain"].get("libfsdp_python")) is not None:
            limit = 1.2 if row["what"].startswith("adamw") else 2
            found.append(at_most(f"{row['what']}: libfsdp over plain", limit, got))
        if (got := row["over_plain"].get("libfsdp_shm")) is not None:
            found.append(at_most(f"{row['what']}: fsdp::optim::AdamW from C++ over it on plain tensors", 1.0, got))
    return found


JUDGES = {"host_cost": host_cost, "step": step, "scale": scale, "collectives": collectives, "optimizer": optimizer}


def judge(report):
    return [a for part, judge_part in JUDGES.items() if part in report for a in judge_part(report[part])]
