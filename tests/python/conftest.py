"""What tests of several hosts share."""

import os
import subprocess

import pytest


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def two_hosts(tmp_path):
    """{address: what to put before a command that runs there} of two that are joined by a cable: network namespaces,
    in which processes see none of the other one's."""
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
        alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        yield {address: ["ip", "netns", "exec", name, *alone] for address, name in hosts.items()}
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


