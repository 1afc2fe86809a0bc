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
    def __init__(self, name, argv, *, ranks, log_dir, python_path=None, timeout=600):
        self.name = name
        self.timeout = timeout
        os.makedirs(log_dir, exist_ok=True)
        self.logs = [os.path.join(log_dir, f"{name}.rank{rank}.log") for rank in range(ranks)]
        env = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE=str(ranks),
                   OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
        if python_path:
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [python_path, env.get("PYTHONPATH")]))
        self.processes = []
        for rank, log in enumerate(self.logs):
            core = core_of(rank)
            with open(log, "w") as stderr:
                self.processes.append(subprocess.Popen(
                    argv + (["--rank", str(rank)] if ranks > 1 else []), text=True, bufsize=1,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
                    env=dict(env, RANK=str(rank), LOCAL_RANK=str(rank)),
                    preexec_fn=lambda core=core: os.sched_setaffinity(0, {core})))
        try:
            self.ready = self._replies("start-up")
        except BaseException:
            self.close()
            raise

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
        replies = []
        for rank, process in enumerate(self.processes):
            waited = select.select([process.stdout], [], [], max(0, deadline - time.monotonic()))[0]
            line = process.stdout.readline() if waited else None
            if not line:
                with open(self.logs[rank]) as log:
                    tail = log.read()[-2000:]
                how = "did not answer in time" if line is None else "ended"
                raise BenchError(f"{self.name}, rank {rank}: {how} ({what})\n{tail}")
            replies.append(json.loads(line))
        return replies

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
