"""One picture a part."""

import os

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from .parts.scale import by_shape  # noqa: E402
from .parts.step import title  # noqa: E402

COLORS = {"plain": "#9aa0a6", "cpp_plain": "#c5c9cd", "ddp": "#f2a65a", "fsdp2": "#d1495b", "libfsdp_cpp": "#2e86ab",
          "libfsdp_mpi": "#6a8caf", "libfsdp_shm": "#44af69", "libfsdp_inplace": "#1b7837", "libfsdp_python": "#7fc8a9",
          "libfsdp_python_inplace": "#5aae61", "libfsdp_classic": "#b5d99c"}
NAMES = {"plain": "plain", "cpp_plain": "plain C++", "ddp": "DDP", "fsdp2": "FSDP2", "libfsdp_cpp": "libfsdp C++",
         "libfsdp_mpi": "libfsdp C++\nMPI", "libfsdp_shm": "libfsdp C++\nshared memory", "libfsdp_inplace": "libfsdp C++\nin place",
         "libfsdp_python": "libfsdp Python\nshared memory",
         "libfsdp_python_inplace": "libfsdp Python\nin place", "libfsdp_classic": "libfsdp classic\nshared memory"}


def bars(ax, labels, values, colors):
    drawn = ax.bar(labels, values, color=colors)
    ax.bar_label(drawn, fmt="%.3g", padding=2)
    ax.margins(y=0.15)
    ax.spines[["top", "right"]].set_visible(False)
    if len(labels) > 5:
        ax.tick_params("x", labelrotation=35)
        plt.setp(ax.get_xticklabels(), ha="right", rotation_mode="anchor")


def host_cost(section):
    fig, ax = plt.subplots(figsize=(5, 4))
    sides = [s for s in ("fsdp2", "libfsdp_python", "libfsdp_cpp") if section.get(f"{s}_us") is not None]
    bars(ax, [NAMES[s] for s in sides], [section[f"{s}_us"] for s in sides], [COLORS[s] for s in sides])
    ax.set(ylabel="extra us per block, forward + backward", title="Host cost of sharding")
    return fig


def step(entries):
    columns = min(len(entries), 3)
    rows = -(-len(entries) // columns)
    fig, axes = plt.subplots(rows, columns, figsize=(5.5 * columns, 4 * rows), squeeze=False)
    for ax in axes.flat[len(entries):]:
        ax.set_axis_off()
    for ax, entry in zip(axes.flat, entries):
        sides = list(entry["over_plain"])
        bars(ax, [NAMES[s] for s in sides], [entry["over_plain"][s] for s in sides], [COLORS[s] for s in sides])
        ax.axhline(1, color="black", linewidth=0.8, linestyle=":")
        ax.set(title=title(entry))
        ax.tick_params(axis="x", labelsize=8)
    for ax in axes[:, 0]:
        ax.set_ylabel("step time over plain")
    return fig


def scale(section):
    fig, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    groups = section["groups"]
    for key, name in (("setup_us_per_group", "set-up"), ("host_us_per_group", "forward + backward")):
        left.plot([p["groups"] for p in groups], [p[key] for p in groups], marker="o", label=name)
    for (rows, columns), points in by_shape(section["worlds"]).items():
        for key, name, line in (("setup_us_per_group", "set-up", "--"), ("host_us_per_group", "forward + backward", "-")):
            right.plot([p["world"] for p in points], [p[key] for p in points], line, marker="o",
                       label=f"{name}, {rows:,} x {columns}")
    left.set(xlabel="groups", ylabel="us per group", title="groups, fake world of 8")
    right.set(xlabel="ranks of the fake world", title="world, 10 groups of 4 parameters")
    for ax, ticks in ((left, [p["groups"] for p in groups]), (right, [p["world"] for p in section["worlds"]])):
        ax.set_xscale("log")
        ax.set_xticks(sorted(set(ticks)), [f"{tick:,}" for tick in sorted(set(ticks))])
        ax.minorticks_off()
        ax.set_ylim(bottom=0)
        if ax.lines:
            ax.legend(fontsize=8)
        ax.spines[["top", "right"]].set_visible(False)
    return fig


def memory(section):
    fig, ax = plt.subplots(figsize=(6, 4))
    sides = list(section["sides"])
    bars(ax, [NAMES[s] for s in sides], [section[f"{s}_mb"] for s in sides], [COLORS[s] for s in sides])
    ax.set(ylabel="peak resident MB of a rank", title=f"{section['parameters'] / 1e6:.0f} M parameters with AdamW")
    return fig


def collectives(rows):
    ops = sorted({row["op"] for row in rows})
    fig, axes = plt.subplots(1, len(ops), figsize=(5.5 * len(ops), 4), squeeze=False)
    for ax, op in zip(axes[0], ops):
        of_op = [row for row in rows if row["op"] == op]
        for side, color in (("gloo", COLORS["libfsdp_cpp"]), ("mpi", COLORS["fsdp2"]),
                            ("shm", COLORS["libfsdp_shm"]), ("shm_own", COLORS["libfsdp_inplace"]),
                            ("memcpy", "black")):
            if of_op[0][f"{side}_us"] is None:
                continue
            ax.plot([r["bytes"] for r in of_op], [r[f"{side}_us"] for r in of_op], marker="o", label=side, color=color)
        ax.set(xscale="log", yscale="log", xlabel="bytes of a rank's part", ylabel="us", title=op.replace("_", "-"))
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend()
    return fig


def optimizer(rows):
    fig, axes = plt.subplots(1, len(rows), figsize=(4 * len(rows), 4), squeeze=False)
    for ax, row in zip(axes[0], rows):
        drawn = {"plain": "plain", "fsdp2": "fsdp2", "libfsdp": "libfsdp_python", "libfsdp_fused": "libfsdp_shm"}
        sides = [s for s in drawn if row[f"{s}_ms"] is not None]
        names = {"libfsdp": "libfsdp", "libfsdp_fused": "libfsdp\nfused, C++"} | NAMES
        bars(ax, [names[s] for s in sides], [row[f"{s}_ms"] for s in sides], [COLORS[drawn[s]] for s in sides])
        ax.set(title=row["what"], ylabel="ms")
    return fig


DRAWERS = {"host_cost": host_cost, "step": step, "scale": scale, "memory": memory, "collectives": collectives,
           "optimizer": optimizer}


def draw(report, folder):
    """Paths of the pictures drawn."""
    paths = []
    for part, drawer in DRAWERS.items():
        if report.get(part):
            fig = drawer(report[part])
            paths.append(os.path.join(folder, f"{part}.png"))
            fig.tight_layout()
            fig.savefig(paths[-1], dpi=120)
            plt.close(fig)
    return paths
