"""Ranks of two hosts, two on each, without a word about it: they meet on their host first, and over Gloo then."""

import os
import pathlib
import subprocess

import pytest

TIMEOUT = 120


@pytest.mark.parametrize("body, says, named", [("launched_collectives", "collectives done", True),
                                               ("launched_trains", "trained", False)])
def test_two_hosts_of_two_ranks(two_hosts, body, says, named):
    if "FSDP_BINARY_DIR" not in os.environ:
        pytest.skip("FSDP_BINARY_DIR is not set to the build folder")
    program = pathlib.Path(os.environ["FSDP_BINARY_DIR"]) / "tests" / "fsdp_comm_test"
    address = next(iter(two_hosts))
    running = []
    for host, inside in enumerate(two_hosts.values()):
        script = "for i in 0 1; do RANK=$((FIRST + i)) LOCAL_RANK=$i $PROGRAM & all=\"$all $!\"; done; "
        script += "for one in $all; do wait $one || exit 1; done"
        environment = {**os.environ, "FSDP_TEST_BODY": body, "OMP_NUM_THREADS": "1", "PROGRAM": str(program),
                       "FIRST": str(2 * host), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": address,
                       "MASTER_PORT": "29500"}
        if named:
            environment["GLOO_SOCKET_IFNAME"] = inside[3]  # of the same name as its namespace
        running.append(subprocess.Popen([*inside, "sh", "-c", script], env=environment, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True))
    try:
        outputs = [each.communicate(timeout=TIMEOUT)[0] for each in running]
    finally:
        for each in running:
            each.kill()
    assert [each.returncode for each in running] == [0, 0], outputs
    assert f"{says} on 4 ranks, first their host's, then all" in outputs[0], outputs
