"""The processes of one side: one a rank, pinned, alive and idle between rounds."""

import json
import os
import select
import shutil
import socket
import subprocess
import tempfile
import time


class BenchError(Exception):
    """A side died, hung or gave a wrong value: the run has no result."""


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def core_of(rank):
    """Ranks go to the cores from the last one down: the first one serves most interrupts."""
    cores = sorted(os.sched_getaffinity(0), reverse=True)
    return cores[rank % len(cores)]


class Rank:
    """A rank's ends: `to` takes commands, `replies` is the descriptor that gives its lines."""

    def __init__(self, process, to, replies, log):
        self.process, self.to, self.replies, self.log = process, to, replies, log


class RankGroup:
    """`launcher`: the beginning of an mpirun command, which starts all ranks itself."""

    def __init__(self, name, argv, *, ranks, log_dir, python_path=None, timeout=600, launcher=None):
        self.name = name
        self.timeout = timeout
        self.log_dir = log_dir
        self.folder = None  # of the ranks' pipes
        os.makedirs(log_dir, exist_ok=True)
        env = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()),
                   OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
        if python_path:
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [python_path, env.get("PYTHONPATH")]))
        if launcher:
            self.ranks = self._launch([*launcher, "-np", str(ranks)], argv, ranks, env)
        else:
            self.ranks = [self._start(argv + (["--rank", str(rank)] if ranks > 1 else []), rank,
                                      dict(env, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks)))
                          for rank in range(ranks)]
        try:
            self.ready = self._replies("start-up")
        except BaseException:
            self.close()
            raise

    def _open_log(self, who):
        return open(os.path.join(self.log_dir, f"{self.name}.{who}.log"), "w")

    def _start(self, argv, rank, env):
        core = core_of(rank)
        with self._open_log(f"rank{rank}") as log:
            process = subprocess.Popen(argv, text=True, bufsize=1, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                                       env=env, preexec_fn=lambda: os.sched_setaffinity(0, {core}))
        return Rank(process, process.stdin, process.stdout.fileno(), log.name)

    def _launch(self, launcher, argv, ranks, env):
        """mpirun gives its input to one rank: each takes its commands from a pipe of its own, pinned like all others."""
        folder = tempfile.mkdtemp()
        for rank in range(ranks):
            for end in ("to", "from"):
                os.mkfifo(os.path.join(folder, f"{end}.{rank}"))
        cores = " ".join(str(core_of(rank)) for rank in range(ranks))
        script = (f'i=$OMPI_COMM_WORLD_RANK; core=$(echo {cores} | cut -d " " -f $((i + 1))); '
                  f'exec taskset -c $core "$@" < {folder}/to.$i > {folder}/from.$i')
        with self._open_log("mpirun") as log:
            process = subprocess.Popen([*launcher, "--bind-to", "none", "sh", "-c", script, "sh", *argv], env=env, stderr=log,
                                       stdin=subprocess.DEVNULL, stdout=log, start_new_session=True)
        # Opened both ways, an end is there before the rank is.
        ends = [[os.open(os.path.join(folder, f"{end}.{rank}"), os.O_RDWR) for end in ("to", "from")]
                for rank in range(ranks)]
        self.folder = folder
        return [Rank(process, os.fdopen(to, "w", buffering=1), replies, log.name) for to, replies in ends]

    def ask(self, *command):
        """Sends the command to every rank; the ranks' replies."""
        line = " ".join(map(str, command))
        for rank in self.ranks:
            try:
                rank.to.write(line + "\n")
            except BrokenPipeError:
                pass  # the rank is gone; _replies says so
        return self._replies(line)

    def _replies(self, what):
        deadline = time.monotonic() + self.timeout
        return [self._reply(i, rank, deadline, what) for i, rank in enumerate(self.ranks)]

    def _reply(self, i, rank, deadline, what):
        line = ""
        while not line.endswith("\n"):
            # Byte by byte: what a buffer held would hide from select.
            waited = select.select([rank.replies], [], [], 1)[0]
            piece = os.read(rank.replies, 1) if waited else None
            over = rank.process.poll() is not None and not waited
            if over or piece == b"" or (piece is None and time.monotonic() > deadline):
                with open(rank.log) as log:
                    tail = log.read()[-2000:]
                how = "ended" if over or piece == b"" else "did not answer in time"
                raise BenchError(f"{self.name}, rank {i}: {how} ({what})\n{tail}")
            line += (piece or b"").decode()
        return json.loads(line)

    def close(self):
        for rank in self.ranks:
            try:
                rank.to.close()
            except BrokenPipeError:
                pass
        for rank in self.ranks:
            try:
                rank.process.wait(10)
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
        if self.folder:
            shutil.rmtree(self.folder)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
