#!/usr/bin/env python3
"""Runs a program as several ranks on this host:  launch.py --ranks 2 PROGRAM [ARGUMENTS...]

Each rank gets torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK, ..., MASTER_ADDR, MASTER_PORT) and, unless it is
set, OMP_NUM_THREADS=1: one thread a rank, whatever the number of ranks, so that runs can be compared.

SIGINT and SIGTERM are passed on, once, to every rank; a second one kills them. If a rank fails, the others get a few
seconds to notice and are then ended. The exit status is that of the rank that failed first (128 + n if signal n
killed it).
"""
import argparse
import os
import signal
import socket
import subprocess
import sys
import time

NOTICE_SECONDS = 5  # for the others to report why they end, after the first failure
END_SECONDS = 10  # between SIGTERM and SIGKILL


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(command, ranks):
    """Starts the ranks, each in a session of its own: a terminal's Ctrl-C reaches them only through this process."""
    shared = {"OMP_NUM_THREADS": "1"} | os.environ | {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    started = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        started.append(subprocess.Popen(command, env=shared | own, start_new_session=True))
    return started


def send(processes, number):
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)


def wait(processes):
    """Waits for all; returns the status of the first that failed, else 0."""
    status, failed_at = 0, None
    while True:
        returned = [process.poll() for process in processes]
        failed = [code for code in returned if code]
        if status == 0 and failed:
            # Of those seen at once, a rank that a signal killed (a negative code) is the cause of the others' errors.
            status = min(failed) if min(failed) < 0 else failed[0]
        if None not in returned:
            return 128 - status if status < 0 else status
        if status != 0:
            failed_at = failed_at or time.monotonic()
            waited = time.monotonic() - failed_at
            if waited > NOTICE_SECONDS + END_SECONDS:
                send(processes, signal.SIGKILL)
            elif waited > NOTICE_SECONDS:
                send(processes, signal.SIGTERM)
        time.sleep(0.05)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="number of processes (default 2)")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="PROGRAM [ARGUMENTS...]")
    arguments = parser.parse_args()
    if arguments.ranks < 1:
        parser.error(f"--ranks must be at least 1, not {arguments.ranks}")
    if not arguments.command:
        parser.error("no program to run")

    processes, signals = [], []

    def on_signal(number, _frame):
        signals.append(number)
        send(processes, number if len(signals) == 1 else signal.SIGKILL)

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    try:
        processes += start(arguments.command, arguments.ranks)
    except OSError as error:
        send(processes, signal.SIGKILL)
        print(f"launch.py: {arguments.command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    return wait(processes)


if __name__ == "__main__":
    sys.exit(main())
