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


def mpirun(program, body, ranks, *options, inside=(), **variables):
    """The output of `ranks` processes that run the C++ test's body."""
    variables = {"FSDP_TEST_BODY": body, "OMP_NUM_THREADS": "1", **variables}
    command = [*inside, "mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(ranks), *options]
    for name in variables:
        command += ["-x", name]
    done = subprocess.run([*command, str(program)], capture_output=True, text=True, timeout=TIMEOUT,
                          env={**os.environ, **variables})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_collective(program, ranks):
    assert f"collectives done on {ranks} ranks" in mpirun(program, "mpi_collectives", ranks)


def test_a_peer_that_is_late_is_a_timeout(program):
    assert "rank 0 timed out" in mpirun(program, "mpi_timeout", 2)


@pytest.mark.parametrize("ranks", [2, 3])
def test_trains_like_plain(program, ranks):
    assert f"trained on {ranks} ranks" in mpirun(program, "mpi_trains", ranks)


# --- two hosts --------------------------------------------------------------------------------------------------------


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def two_hosts(tmp_path):
    """{address: network namespace} of two that are joined by a cable; what mpirun starts on one runs inside of it."""
    names = [f"fsdp{os.getpid()}{side}" for side in "ab"]
    hosts = dict(zip(["10.87.0.1", "10.87.0.2"], names))
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", names[0], "type", "veth", "peer", "name", names[1])
            for address, name in hosts.items():
                ip("link", "set", name, "netns", name)
                ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
                for device in (name, "lo"):
                    ip("-n", name, "link", "set", device, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield hosts
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.parametrize("body, says", [("mpi_collectives", "collectives done"), ("mpi_trains", "trained")])
def test_a_host_file_over_two_hosts(program, two_hosts, tmp_path, body, says):
    first, second = two_hosts
    hostfile = tmp_path / "hosts"
    hostfile.write_text("".join(f"{address} slots=1\n" for address in two_hosts))
    # In ssh's place: `agent <address> <command>` runs the command on that host.
    agent = tmp_path / "agent"
    cases = "".join(f"  {address}) space={name} ;;\n" for address, name in two_hosts.items())
    agent.write_text(f'#!/bin/sh\ncase "$1" in\n{cases}esac\nshift\nexec ip netns exec "$space" sh -c "$*"\n')
    agent.chmod(0o755)
    network = "10.87.0.0/24"
    options = ["--hostfile", str(hostfile), "--map-by", "node", "--mca", "plm_rsh_agent", str(agent)]
    for parameter, value in (("btl", "tcp,self"), ("btl_tcp_if_include", network), ("oob_tcp_if_include", network)):
        options += ["--mca", parameter, value]
    output = mpirun(program, body, 2, *options, inside=["ip", "netns", "exec", two_hosts[first]],
                    MASTER_ADDR=first, MASTER_PORT="29500")
    assert f"{says} on 2 ranks" in output
