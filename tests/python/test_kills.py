"""A rank is killed at a random moment of a training run: the others say so and end, and what is on disk is whole.

KILLS=100 (`make soak`) kills that often; the moments follow from the number of the kill.
"""

import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
RANKS = 3
PEER_TIMEOUT = 5  # of a collective
END_SECONDS = 60  # the machine may be busy; a rank that is told of its peer's end needs far less
TINY = """--layers 2 --heads 2 --width 16 --context 16 --batch 12 --warmup 3 --eval-every 0 --save-every 1
          --sample-bytes 0 --log-seconds 0""".split()


@pytest.fixture(scope="module")
def program():
    if "FSDP_BINARY_DIR" not in os.environ:
        pytest.skip("FSDP_BINARY_DIR is not set to the build folder")
    return pathlib.Path(os.environ["FSDP_BINARY_DIR"]) / "examples" / "gpt" / "gpt"


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def command(program, out, *arguments):
    data = ["--data", str(ROOT / "LICENSE"), "--out", str(out)]
    return [str(program), *data, *TINY, "--timeout", str(PEER_TIMEOUT), *map(str, arguments)]


def start(program, out, engine):
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(free_port())}
    return [
        subprocess.Popen(command(program, out, "--engine", engine, "--steps", 1_000_000), text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                         env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(RANKS)
    ]


def wait_for_a_checkpoint(out):
    deadline = time.monotonic() + END_SECONDS
    while not (out / "checkpoint" / "index.json").exists():
        assert time.monotonic() < deadline, "nothing was saved"
        time.sleep(0.01)


@pytest.mark.parametrize("kill", range(int(os.environ.get("KILLS", "10"))))
def test_a_kill_at_any_moment(program, tmp_path, kill):
    draw = random.Random(kill)
    engine = draw.choice(["shm", "gloo"])
    shared_before = set(os.listdir("/dev/shm"))
    ranks = start(program, tmp_path / "run", engine)
    try:
        wait_for_a_checkpoint(tmp_path / "run")
        time.sleep(draw.uniform(0, 0.5))
        victim = draw.randrange(RANKS)
        ranks[victim].send_signal(signal.SIGKILL)
        outputs = [rank.communicate(timeout=END_SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[victim].returncode == -signal.SIGKILL
    for number, (rank, output) in enumerate(zip(ranks, outputs)):
        if number != victim:
            assert rank.returncode == 1, f"{engine}, rank {number}: {rank.returncode}\n{output[-2000:]}"
            assert f"rank {number}" in output, output[-2000:]
    assert set(os.listdir("/dev/shm")) <= shared_before

    # Loads it all, then finds that there is nothing left to do.
    with open(tmp_path / "run" / "checkpoint" / "index.json") as index:
        step = json.load(index)["step"]
    resumed = subprocess.run(command(program, tmp_path / "run", "--resume", "--steps", step), capture_output=True,
                             text=True, timeout=END_SECONDS)
    assert f"the checkpoint is at step {step} of --steps {step}" in resumed.stderr, resumed.stdout + resumed.stderr
