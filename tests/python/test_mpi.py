"""The engine mpi under mpirun: on this host, and by a host file on two hosts that are network namespaces."""

import os
import pathlib
import shutil
import subprocess

import pytest

TIMEOUT = 120


@pytest.fixture(scope="module")
def program():
    if "FSDP_BINARY_DIR" not in os.environ:
        pytest.skip("FSDP_BINARY_DIR is not set to the build folder")
    path = pathlib.Path(os.environ["FSDP_BINARY_DIR"]) / "tests" / "fsdp_comm_test"
    if not shutil.which("mpirun") or "libmpi" not in subprocess.run(["ldd", path], capture_output=True, text=True).stdout:
        pytest.skip("no mpirun, or a build without MPI")
    return path


def mpirun(program, body, ranks, *options, inside=(), engine="mpi", **variables):
    """The output of `ranks` processes that run the C++ test's body."""
    variables = {"FSDP_TEST_BODY": body, "LIBFSDP_TEST_ENGINE": engine, "OMP_NUM_THREADS": "1", **variables}
    command = [*inside, "mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(ranks), *options]
    for name in variables:
        command += ["-x", name]
    done = subprocess.run([*command, str(program)], capture_output=True, text=True, timeout=TIMEOUT,
                          env={**os.environ, **variables})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_collective(program, ranks):
    assert f"collectives done on {ranks} ranks" in mpirun(program, "launched_collectives", ranks)


def test_a_peer_that_is_late_is_a_timeout(program):
    assert "rank 0 timed out" in mpirun(program, "mpi_timeout", 2)


@pytest.mark.parametrize("ranks", [2, 3])
def test_trains_like_plain(program, ranks):
    assert f"trained on {ranks} ranks" in mpirun(program, "launched_trains", ranks)


# --- two hosts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine, ranks, how", [("mpi", 1, ""), ("shm+mpi", 2, ", first their host's, then all")])
@pytest.mark.parametrize("body, says", [("launched_collectives", "collectives done"), ("launched_trains", "trained")])
def test_a_host_file_over_two_hosts(program, two_hosts, tmp_path, body, says, engine, ranks, how):
    first, second = two_hosts
    hostfile = tmp_path / "hosts"
    hostfile.write_text("".join(f"{address} slots={ranks}\n" for address in two_hosts))
    # In ssh's place: `agent <address> <command>` runs the command on that host.
    agent = tmp_path / "agent"
    cases = "".join(f"  {address}) inside='{' '.join(two_hosts[address])}' ;;\n" for address in two_hosts)
    agent.write_text(f'#!/bin/sh\ncase "$1" in\n{cases}esac\nshift\nexec $inside sh -c "$*"\n')
    agent.chmod(0o755)
    network = "10.87.0.0/24"
    options = ["--hostfile", str(hostfile), "--map-by", "slot", "--mca", "plm_rsh_agent", str(agent)]
    for parameter, value in (("btl", "tcp,self"), ("btl_tcp_if_include", network), ("oob_tcp_if_include", network)):
        options += ["--mca", parameter, value]
    output = mpirun(program, body, 2 * ranks, *options, inside=two_hosts[first], engine=engine, MASTER_ADDR=first,
                    MASTER_PORT="29500")
    assert f"{says} on {2 * ranks} ranks{how}" in output
