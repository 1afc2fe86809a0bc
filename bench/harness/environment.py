"""What the figures depend on and no one can see in them."""

import datetime
import os
import platform
import subprocess

import torch

from .rank_group import core_of


def git(*args):
    here = os.path.dirname(os.path.abspath(__file__))
    done = subprocess.run(["git", "-C", here, *args], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def cpu_model():
    with open("/proc/cpuinfo") as f:
        return next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), platform.machine())


def memory_gb():
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def describe():
    cores = sorted(os.sched_getaffinity(0))
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(git("status", "--porcelain", "--untracked-files=no")),
        "cpu": cpu_model(),
        "cores": len(cores),
        "memory_gb": round(memory_gb(), 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads_per_rank": 1,
        "pinning": {f"rank {rank}": f"core {core_of(rank)}" for rank in range(2)},
        "load_before": round(os.getloadavg()[0], 2),
    }
