"""The processes of one side: one a rank, pinned, alive and idle between rounds."""

import json
import os
import select
import socket
import subprocess
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


class RankGroup:
    """`launcher`: the beginning of a command that starts all ranks itself, gives the first of them its standard input, and
    joins their output."""

    def __init__(self, name, argv, *, ranks, log_dir, python_path=None, timeout=600, launcher=None):
        self.name = name
        self.timeout = timeout
        self.lines_of_each = ranks if launcher else 1
        os.makedirs(log_dir, exist_ok=True)
        self.logs = [os.path.join(log_dir, f"{name}.rank{rank}.log") for rank in range(ranks)]
        env = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()),
                   OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
        if python_path:
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [python_path, env.get("PYTHONPATH")]))
        self.processes = []
        if launcher:
            self._start([*launcher, *argv], self.logs[0], env)
        else:
            for rank, log in enumerate(self.logs):
                core = core_of(rank)
                self._start(argv + (["--rank", str(rank)] if ranks > 1 else []), log,
                            dict(env, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks)),
                            preexec_fn=lambda core=core: os.sched_setaffinity(0, {core}))
        try:
            self.ready = self._replies("start-up")
        except BaseException:
            self.close()
            raise

    def _start(self, argv, log, env, **options):
        with open(log, "w") as stderr:
            self.processes.append(subprocess.Popen(argv, text=True, bufsize=1, stdin=subprocess.PIPE,
                                                   stdout=subprocess.PIPE, stderr=stderr, env=env, **options))

    def ask(self, *command):
        """Sends the command to every rank; the ranks' replies."""
        line = " ".join(map(str, command))
        for process in self.processes:
            try:
                process.stdin.write(line + "\n")
            except BrokenPipeError:
                pass  # the rank is gone; _replies says so
        return self._replies(line)

    def _replies(self, what):
        deadline = time.monotonic() + self.timeout
        return [self._reply(i, process, deadline, what)
                for i, process in enumerate(self.processes) for _ in range(self.lines_of_each)]

    def _reply(self, i, process, deadline, what):
        line = ""
        while not line.endswith("\n"):
            # Byte by byte: what a buffer held would hide from select.
            waited = select.select([process.stdout], [], [], max(0, deadline - time.monotonic()))[0]
            piece = os.read(process.stdout.fileno(), 1) if waited else None
            if not piece:
                with open(self.logs[i]) as log:
                    tail = log.read()[-2000:]
                how = "did not answer in time" if piece is None else "ended"
                raise BenchError(f"{self.name}, rank {i}: {how} ({what})\n{tail}")
            line += piece.decode()
        return json.loads(line)

    def close(self):
        for process in self.processes:
            try:
                process.stdin.close()
            except BrokenPipeError:
                pass
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
