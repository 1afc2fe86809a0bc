"""The training program of examples/gpt, run as a user runs it: tiny models, real processes."""

import csv
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "gpt"
DATA = ROOT / "LICENSE"
GOLDEN = ROOT / "tests" / "golden" / "gpt_tiny.csv"
TIMEOUT = 120
TINY = """--layers 2 --heads 2 --width 16 --context 16 --batch 12 --steps 12 --warmup 3 --lr 0.005 --eval-every 6
          --eval-batches 1 --save-every 5 --sample-bytes 8 --log-seconds 0 --timeout 60""".split()


@pytest.fixture(scope="session")
def program():
    if "FSDP_BINARY_DIR" not in os.environ:
        pytest.skip("FSDP_BINARY_DIR is not set to the build folder")
    return pathlib.Path(os.environ["FSDP_BINARY_DIR"]) / "examples" / "gpt" / "gpt"


def command(program, ranks, out, *arguments, data=DATA):
    launcher = [sys.executable, str(EXAMPLE / "launch.py"), "--ranks", str(ranks)]
    return launcher + [str(program), "--data", str(data), "--out", str(out), *TINY, *map(str, arguments)]


def train(program, ranks, out, *arguments, data=DATA):
    return subprocess.run(
        command(program, ranks, out, *arguments, data=data), capture_output=True, text=True, timeout=TIMEOUT
    )


def train_well(program, ranks, out, *arguments):
    done = train(program, ranks, out, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rows(out):
    with open(out / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def column(out, name):
    return [float(row[name]) for row in rows(out) if row[name]]


def start(program, ranks, out, *arguments, until):
    """Starts a run and returns it when it has printed a line that begins with `until`."""
    process = subprocess.Popen(
        command(program, ranks, out, *arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith(until):
            return process
    pytest.fail(f"the run ended before {until!r}:\n" + "".join(seen))


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


@pytest.fixture(scope="module")
def plain(program, tmp_path_factory):
    """The unsharded run, which the others must follow."""
    out = tmp_path_factory.mktemp("plain")
    return out, train_well(program, 1, out)


def assert_follows(out, reference, relative=2e-4):
    for name in ("step", "loss", "val_loss", "lr", "grad_norm"):
        assert column(out, name) == pytest.approx(column(reference, name), rel=relative), name


def test_plain_run_learns_and_reports(plain):
    out, text = plain
    first, *_, last = column(out, "loss")
    assert first == pytest.approx(5.55, abs=0.05) and last < first - 0.5
    assert [row["step"] for row in rows(out)] == [str(n) for n in range(1, 13)]
    assert [row["step"] for row in rows(out) if row["val_loss"]] == ["6", "12"]
    assert all(float(row["tokens_per_s"]) > 0 and float(row["rss_mb"]) > 10 for row in rows(out))

    lines = text.strip().splitlines()
    assert lines[-1] == f"final loss {last:.3f} (first loss {first:.3f}, 12 steps, 1 ranks)"
    assert re.search(r"^step +7/12  loss \d\.\d{3}  +[\d,]+ tokens/s  \d+ MB  \d+m \d\ds left", text, re.MULTILINE)
    assert re.search(r"--- sample ---\ndef .*", text)


def test_plain_run_follows_the_golden_curve(plain):
    with open(GOLDEN, newline="") as file:
        golden = [float(row["loss"]) for row in csv.DictReader(file)]
    assert column(plain[0], "loss") == pytest.approx(golden, rel=1e-3)


@pytest.mark.parametrize(
    "ranks, arguments",
    [
        (1, ["--shard"]),
        (2, []),
        (2, ["--no-reshard"]),
        (2, ["--accumulate", "3"]),
        (3, []),
        (3, ["--accumulate", "2"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else f"{value} ranks",
)
def test_sharded_runs_follow_the_plain_one(program, plain, tmp_path, ranks, arguments):
    text = train_well(program, ranks, tmp_path, *arguments)
    assert_follows(tmp_path, plain[0])
    assert f"12 steps, {ranks} ranks)" in text.strip().splitlines()[-1]
    sample = re.compile(r"--- sample ---\n(.*)\n-----", re.DOTALL)
    assert sample.search(text)[1] == sample.search(plain[1])[1]


def test_a_batch_that_ranks_share_unevenly(program, tmp_path):
    """11 rows on 3 ranks: the loss is still the mean over rows."""
    train_well(program, 1, tmp_path / "plain", "--batch", 11)
    train_well(program, 3, tmp_path / "sharded", "--batch", 11)
    assert_follows(tmp_path / "sharded", tmp_path / "plain")


def test_tied_head(program, tmp_path):
    train_well(program, 1, tmp_path / "plain", "--tied")
    train_well(program, 2, tmp_path / "sharded", "--tied")
    assert_follows(tmp_path / "sharded", tmp_path / "plain")


def test_bf16_stays_near_float32(program, plain, tmp_path):
    train_well(program, 2, tmp_path, "--bf16")
    assert column(tmp_path, "loss") == pytest.approx(column(plain[0], "loss"), abs=0.05)


def test_other_seeds_take_other_courses(program, plain, tmp_path):
    train_well(program, 1, tmp_path, "--seed", 2)
    assert column(tmp_path, "loss") != pytest.approx(column(plain[0], "loss"), rel=1e-3)


LONG = ["--steps", 150, "--save-every", 20, "--lr", 0.001]


@pytest.fixture(scope="module")
def long_plain(program, tmp_path_factory):
    out = tmp_path_factory.mktemp("long")
    train_well(program, 1, out, *LONG)
    return out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_ranks_at_one_step(program, long_plain, tmp_path, number):
    process = start(program, 2, tmp_path, *LONG, until="step     7/")
    process.send_signal(number)
    text, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, text
    stopped = int(re.search(r"stopped after step (\d+); continue with --resume", text)[1])
    assert 7 <= stopped < 150 and len(rows(tmp_path)) == stopped
    assert f"{stopped} steps, 2 ranks)" in text.strip().splitlines()[-1]

    text = train_well(program, 3, tmp_path, *LONG, "--resume")
    assert f"resumed after step {stopped}\n" in text
    assert f"first loss {column(long_plain, 'loss')[0]:.3f}, 150 steps, 3 ranks)" in text.strip().splitlines()[-1]
    assert_follows(tmp_path, long_plain, relative=2e-3)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_killed_run_resumes_from_its_last_checkpoint(program, long_plain, tmp_path, ranks):
    process = start(program, 2, tmp_path, *LONG, until="step    47/")
    victims = children(process.pid)
    os.kill(victims[1], signal.SIGKILL)
    began = time.monotonic()
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert time.monotonic() - began < 30
    assert not any(pathlib.Path(f"/proc/{pid}").exists() for pid in victims)

    text = train_well(program, ranks, tmp_path, *LONG, "--resume")
    resumed = int(re.search(r"resumed after step (\d+)", text)[1])
    assert resumed >= 40 and resumed % 20 == 0
    assert_follows(tmp_path, long_plain, relative=2e-3)


def test_resuming_a_finished_run(program, plain, tmp_path):
    checkpoint = plain[0] / "checkpoint"
    done = train(program, 2, tmp_path, "--resume", checkpoint)
    assert done.returncode == 2 and "is at step 12 of --steps 12" in done.stderr
    longer = train(program, 2, tmp_path, "--resume", checkpoint, "--steps", 14)
    assert longer.returncode == 0, longer.stderr
    assert "the checkpoint's run had --steps 12, this one has 14" in longer.stderr
    assert [row["step"] for row in rows(tmp_path)] == ["13", "14"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--bogus"], "--bogus"),
        (["--steps", "0"], "--steps"),
        (["--steps", "many"], "--steps"),
        (["--width", "17"], "--width 17 is not a multiple of --heads 2"),
        (["--batch", "1"], "--batch 1 is too small: 1 micro-batches on 2 ranks need at least 2 rows"),
        (["--accumulate", "7"], "7 micro-batches on 2 ranks need at least 14 rows"),
        (["--temperature", "-1"], "--temperature"),
    ],
)
def test_bad_arguments(program, tmp_path, arguments, message):
    done = train(program, 2, tmp_path, *arguments)
    assert done.returncode == 2
    assert done.stderr.count(message) == 1, done.stderr
    assert not (tmp_path / "metrics.csv").exists()


def test_bad_data(program, tmp_path):
    for data, message in [
        (tmp_path / "absent", "absent does not exist"),
        (tmp_path, "has 0 bytes of text; a context of 16 needs at least 340"),
    ]:
        done = train(program, 2, tmp_path, data=data)
        assert done.returncode == 1 and message in done.stderr, done.stderr


def test_resume_without_a_checkpoint(program, tmp_path):
    done = train(program, 2, tmp_path, "--resume")
    assert done.returncode == 1 and str(tmp_path / "checkpoint") in done.stderr, done.stderr


def test_resume_of_another_model(program, plain, tmp_path):
    done = train(program, 2, tmp_path, "--resume", plain[0] / "checkpoint", "--width", 32)
    assert done.returncode == 1 and "blocks.0" in done.stderr, done.stderr


def test_a_loss_that_is_not_finite(program, tmp_path):
    done = train(program, 1, tmp_path, "--lr", "1e30")
    assert done.returncode == 1 and "try a smaller --lr" in done.stderr, done.stderr


def test_help(program, tmp_path):
    done = train(program, 2, tmp_path, "--help")
    assert done.returncode == 0 and done.stdout.count("--accumulate") == 1


def test_torchrun(program, plain, tmp_path):
    pytest.importorskip("torch")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--no-python", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        torchrun + command(program, 2, tmp_path)[4:], capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stderr
    assert_follows(tmp_path, plain[0])


def test_plot(plain):
    pytest.importorskip("matplotlib")
    subprocess.run([sys.executable, EXAMPLE / "plot.py", plain[0]], check=True, timeout=TIMEOUT)
    assert (plain[0] / "loss_curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("script, status", [("exit 3", 3), ("kill -9 $$", 137), ("exit 0", 0)])
def test_launcher_reports_the_first_failure(script, status):
    """Rank 1 ends as told, the others would sleep."""
    sleep = "exit 0" if status == 0 else "exec sleep 60"
    shell = f'if [ "$RANK" = 1 ]; then {script}; else {sleep}; fi'
    began = time.monotonic()
    done = subprocess.run([sys.executable, EXAMPLE / "launch.py", "--ranks", "3", "sh", "-c", shell], timeout=TIMEOUT)
    assert done.returncode == status and time.monotonic() - began < 15
