#!/usr/bin/env python3
"""Checks who includes whom. Prints each breach as file:line and fails if there is one.

- A room of src/ includes only itself and the rooms below it.
- Public headers, and what is built on libfsdp.so alone (examples), include no room.
- No C++ file but those of python/src sees Python.h or pybind11; gloo, mpi and nccl are seen by src/comm alone.
- No source file is longer than 800 lines.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Lowest first; the list that CMakeLists.txt builds, too.
ROOMS = ["base", "shard", "comm", "mesh", "engine", "tensor", "module", "optim", "checkpoint"]
MAX_LINES = 800
SOURCES = ["include", "src", "python", "tests", "examples", "bench", "third_party"]

INCLUDE = re.compile(r'\s*#\s*include\s*[<"]([^>"]+)[>"]')
PYTHON = re.compile(r"^(Python\.h|pybind11/|torch/python\.h|torch/extension\.h|torch/csrc/(python_headers|utils/pybind)\.h)")
WIRE = re.compile(r"^(gloo/|mpi\.h|nccl\.h)|ProcessGroup(Gloo|MPI|NCCL)\.hpp$")


def room_of(include):
    """The room that an include names, or None."""
    room, slash, _ = include.partition("/")
    return room if slash and room in ROOMS else None


def judge(path, include):
    """What is wrong with this include in this file (a path within the project), or None."""
    area, room = path.parts[0], path.parts[1]
    named = room_of(include)
    if PYTHON.match(include) and area != "python":
        return "Python headers have no place in the C++ core"
    if WIRE.search(include) and area != "third_party" and (area, room) != ("src", "comm"):
        return "only src/comm may see a transport's headers"
    if area == "src" and named and ROOMS.index(named) > ROOMS.index(room):
        return f"room {room} may not include room {named}, which is above it"
    if area in ("include", "examples") and named:
        return f"{area}/ may include public headers only, not room {named}"
    if area == "include" and include.startswith("src/"):
        return "a public header may not reach into src/"
    return None


def check(path):
    lines = (ROOT / path).read_text().splitlines()
    if len(lines) > MAX_LINES:
        yield f"{path}: {len(lines)} lines; split it (the limit is {MAX_LINES})"
    if path.parts[0] == "src" and path.parts[1] not in ROOMS:
        yield f"{path}: src/{path.parts[1]} is not a room; add it to ROOMS in {Path(__file__).name} and CMakeLists.txt"
        return
    for number, line in enumerate(lines, 1):
        if match := INCLUDE.match(line):
            if wrong := judge(path, match[1]):
                yield f"{path}:{number}: includes {match[1]}: {wrong}"


def rooms_that_cmake_builds():
    match = re.search(r"set\(FSDP_ROOMS ([a-z ]+?) CACHE", (ROOT / "CMakeLists.txt").read_text())
    return match[1].split() if match else None


def main():
    files = [f.relative_to(ROOT) for area in SOURCES for f in sorted((ROOT / area).rglob("*"))
             if f.suffix in (".h", ".cc") and len(f.relative_to(ROOT).parts) > 2]
    breaches = [breach for path in files for breach in check(path)]
    if rooms_that_cmake_builds() != ROOMS:
        breaches.append(f"CMakeLists.txt: FSDP_ROOMS is not the list in {Path(__file__).name}")
    print("\n".join(breaches) or f"layers: {len(files)} files, all in order")
    return bool(breaches)


if __name__ == "__main__":
    sys.exit(main())
