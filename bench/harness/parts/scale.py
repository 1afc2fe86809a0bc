"""How libfsdp's set-up and host cost grow with the number of groups and with the world."""

from statistics import median

from ..rounds import run_round

GROUPS = [10, 100, 1000]
WORLDS = [8, 1024, 16384]
#: (rows, columns) of each parameter: matrices and vectors with more rows than any world has ranks, and vectors with so
#: few that most shards are empty. Vectors are the hard case: at 16,384 ranks a rank holds 8 bytes of each.
SHAPES = [(32768, 16), (32768, 1), (16, 1)]


def measure(bench):
    if not bench.has("libfsdp_cpp"):
        return {"groups": [], "worlds": []}
    groups, worlds, layers = ([2, 8], [8, 64], 2) if bench.quick else (GROUPS, WORLDS, 10)
    return {
        "groups": [{"groups": n, "world": 8} | measure_point(bench, n, world=8, model="block", width=16)
                   for n in groups],
        "worlds": [{"groups": layers, "world": world, "rows": rows, "columns": columns,
                    "most_shards_empty": rows * 2 < worlds[-1]}
                   | measure_point(bench, layers, world=world, model="rows", rows=rows, columns=columns)
                   for rows, columns in SHAPES for world in worlds],
    }


def measure_point(bench, layers, *, world, **config):
    """Set-up happens once a process, so every launch is a round; plain's process stays and takes turns with it."""
    launches = 1 if bench.quick else 5
    steps = max(3, min(20, 2000 // layers))
    setup, mesh, extra = [], [], []
    config |= dict(layers=layers, engine="fake", world=world)
    with bench.start("cpp_plain", label=".scale", **config) as plain:
        for _ in range(launches):
            with bench.start("libfsdp_cpp", label=".scale", **config) as sharded:
                setup.append(sharded.ready[0]["setup_us"])
                mesh.append(sharded.ready[0]["mesh_us"])
                before = run_round(plain, 2, steps)
                cost = run_round(sharded, 2, steps)
                after = run_round(plain, 2, steps)
                extra.append(cost - (before + after) / 2)
    return {"setup_us": median(setup), "of_which_mesh_us": median(mesh), "setup_us_per_group": median(setup) / layers,
            "host_us_per_group": median(extra) / layers, "launches": launches, "steps": steps}


def by_shape(points):
    """{(rows, columns): its points, by world}"""
    found = {}
    for point in points:
        found.setdefault((point["rows"], point["columns"]), []).append(point)
    return found
