"""The report as text."""

from .parts.step import NAMES as STEP_SIDES
from .parts.step import title


def cell(value):
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def table(title, header, rows):
    rows = [header] + [[cell(value) for value in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = ["  ".join(text.rjust(w) if i else text.ljust(w) for i, (text, w) in enumerate(zip(row, widths)))
             for row in rows]
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join([title] + ["  " + line for line in lines]) + "\n"


def machine(env):
    pins = ", ".join(f"{rank} on {core}" for rank, core in env["pinning"].items())
    text = (f"{env['cpu']}, {env['cores']} cores, {env['memory_gb']} GB; torch {env['torch']}; "
            f"commit {(env['commit'] or 'unknown')[:12]}{' with changes' if env['uncommitted_changes'] else ''}; "
            f"{env['date']}\n{env['threads_per_rank']} thread a rank; {pins}; load before {env['load_before']}\n")
    if env["load_before"] > 0.5:
        text += "NOTE: the machine was busy before the run; these figures are not worth quoting.\n"
    return text


def host_cost(section):
    rows = [["PyTorch FSDP2", section.get("plain_block_us"), section.get("fsdp2_us")],
            ["libfsdp Python", section.get("plain_block_us"), section.get("libfsdp_python_us")],
            ["libfsdp C++", section.get("cpp_plain_block_us"), section.get("libfsdp_cpp_us")]]
    title = (f"Host cost: {section['blocks']} blocks of {section['parameters_per_block']} parameters, "
             f"fake {section['ranks']} ranks, us per block")
    return table(title, ["", "plain", "extra when sharded"], rows) + (
        f"  ({cell(section['fsdp2_fake_copies_us'])} us of FSDP2's are copies that PyTorch's fake group makes)\n")


def step(entries):
    times = [[title(e), e["blocks"], e["batch"], *(e[f"{side}_ms"] for side in STEP_SIDES)] for e in entries]
    over = [[title(e), *(e["over_plain"].get(side) for side in STEP_SIDES[2:])] for e in entries]
    return (table("Step, ms (libfsdp_cpp, DDP and FSDP2 over Gloo; from Python libfsdp takes shared memory)",
                  ["", "blocks", "batch", *STEP_SIDES], times) + "\n"
            + table("Step over the plain step of its own language", ["", *STEP_SIDES[2:]], over))


def scale(section):
    columns = ["set-up us", "of it the mesh", "set-up us/group", "host us/group"]
    keys = ["setup_us", "of_which_mesh_us", "setup_us_per_group", "host_us_per_group"]
    points = lambda p: [p[key] for key in keys]  # noqa: E731
    return (table("Scale in groups (world 8)", ["groups", *columns],
                  [[p["groups"], *points(p)] for p in section["groups"]]) + "\n"
            + table("Scale in the world", ["world", "parameters", "most shards empty", *columns],
                    [[p["world"], f"{p['rows']} x {p['columns']}", p["most_shards_empty"], *points(p)]
                     for p in section["worlds"]]))


def memory(section):
    rows = [[side, m["base_mb"], m["build_peak_mb"], m["peak_mb"], section[f"{side}_mb"],
             section[f"{side}_pss_mb"]]
            for side, m in section["sides"].items()]
    title = f"Memory of a rank, {section['parameters'] / 1e6:.1f} M parameters with AdamW, MB resident"
    return table(title, ["", "before", "building (peak)", "training (peak)", "peak", "all ranks (PSS)"], rows)


def collectives(rows):
    sides = ["gloo", "mpi", "shm", "shm_own", "memcpy"]
    return table("Collectives, 2 ranks, us (shm_own: from the channel's memory; memcpy: the bytes that cannot be spared)", ["", "bytes a rank", *sides],
                 [[r["op"], r["bytes"], *(r[f"{side}_us"] for side in sides)] for r in rows])


def optimizer(rows):
    sides = ["plain", "fsdp2", "libfsdp", "libfsdp_fused"]
    return table("Optimizer, 2 ranks, ms (libfsdp_fused: fsdp::optim::AdamW from C++; the others from Python)",
                 ["", *sides, "fsdp2/plain", "libfsdp/plain", "libfsdp_fused/plain"],
                 [[r["what"], *(r[f"{side}_ms"] for side in sides),
                   *(r["over_plain"].get(side) for side in ("fsdp2", "libfsdp_python", "libfsdp_shm"))] for r in rows])


def aims(found):
    return table("Aims", ["", "aim", "got", "met"], [[a["what"], a["aim"], a["got"], "yes" if a["met"] else "NO"] for a in found])


PRINTERS = {"host_cost": host_cost, "step": step, "scale": scale, "memory": memory,
            "collectives": collectives, "optimizer": optimizer}
