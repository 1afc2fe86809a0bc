"""What every part needs: where the programs are, how long to measure, and how a side is started."""

import contextlib
import functools
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field

from .rank_group import RankGroup

HERE = os.path.dirname(os.path.abspath(__file__))

#: side -> (language, --side of its program, the plain side that it is judged by, its engine between real ranks)
SIDES = {
    "plain": ("torch", "plain", None, "gloo"),
    "ddp": ("torch", "ddp", "plain", "gloo"),
    "fsdp2": ("torch", "fsdp2", "plain", "gloo"),
    "cpp_plain": ("cpp", "plain", None, "gloo"),
    "libfsdp_cpp": ("cpp", "sharded", "cpp_plain", "gloo"),
    "libfsdp_mpi": ("cpp", "sharded", "cpp_plain", "mpi"),
    "libfsdp_shm": ("cpp", "sharded", "cpp_plain", "shm"),
    "libfsdp_inplace": ("cpp", "inplace", "cpp_plain", "shm"),
    # Takes its engine by itself: shared memory, between ranks of one host.
    "libfsdp_python": ("torch", "libfsdp", "plain", "gloo"),
    "libfsdp_python_inplace": ("torch", "inplace", "plain", "gloo"),
    "libfsdp_classic": ("torch", "classic", "plain", "gloo"),
}


#: What starts the ranks of an engine that does not let them start one by one.
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe"]


@functools.cache
def has_mpi(program):
    linked = subprocess.run(["ldd", program], capture_output=True, text=True).stdout
    libraries = [line.split()[2] for line in linked.splitlines() if "libfsdp" in line]
    linked += "".join(subprocess.run(["ldd", each], capture_output=True, text=True).stdout for each in libraries)
    return shutil.which("mpirun") is not None and "libmpi" in linked


@dataclass
class Bench:
    step_bench: str | None  # the C++ program; None leaves its sides out
    package: str | None  # the folder that holds the Python package; None leaves that side out
    log_dir: str
    quick: bool
    rows: list[str]  # of the part step, rows whose title has one of these in it
    failures: list[str] = field(default_factory=list)  # what could not be measured

    def has(self, side):
        if SIDES[side][0] == "cpp":
            return self.step_bench is not None and (SIDES[side][3] != "mpi" or has_mpi(self.step_bench))
        return self.package is not None or not side.startswith("libfsdp")

    def start(self, side, *, ranks=1, engine=None, world=None, label="", flags=(), **config):
        """Starts a side, on its own engine unless one is named. `world` differs from `ranks` only on the fake engine."""
        language, mode, _, own_engine = SIDES[side]
        engine = engine or own_engine
        program = [self.step_bench] if language == "cpp" else [sys.executable, os.path.join(HERE, "torch_side.py")]
        return self.start_program([*program, "--side", mode, *flags], f"{side}{label}", ranks=ranks, engine=engine,
                                  launcher=MPIRUN if engine == "mpi" else None, world=world or ranks, **config)

    def start_program(self, program, name, *, ranks, launcher=None, **config):
        """Starts any program that serves the protocol, with `config` as its options; see RankGroup for `launcher`."""
        argv = list(program)
        for key, value in config.items():
            argv += [f"--{key}", str(value)]
        return RankGroup(name, argv, ranks=ranks, log_dir=self.log_dir, python_path=self.package,
                         launcher=launcher)

    @contextlib.contextmanager
    def sides(self, names, **config):
        """{side: its running ranks}, of the sides that this run has."""
        with contextlib.ExitStack() as stack:
            yield {name: stack.enter_context(self.start(name, **config)) for name in names if self.has(name)}


def references(groups):
    """{side: the plain side that it is judged by}, of the sides in `groups`."""
    return {side: SIDES[side][2] for side in groups if SIDES[side][2] in groups}
