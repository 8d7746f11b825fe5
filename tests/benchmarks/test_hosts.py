"""Hosts that are network namespaces; skipped where none can be made (they need root)."""

import contextlib
import socket
import subprocess

import pytest

from benchmarks.hosts import INTERFACE, Hosts, HostsError, HostsShape


@pytest.fixture(scope="module")
def can_make_hosts():
    try:
        with Hosts():
            pass
    except HostsError as error:
        pytest.skip(str(error))


def names():
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines()}


def output(hosts, host, *command):
    return subprocess.run(hosts.command(host, command), capture_output=True, text=True, check=True).stdout


def test_shapes_are_two_hosts():
    assert HostsShape.parse("2x4").num_ranks == 8
    assert HostsShape.parse("2").num_ranks == 2
    for text in ("3", "3x2", "2x0", "2xtwo", "12x2"):
        with pytest.raises(HostsError, match=f"--hosts {text}: .*such as 2x2"):
            HostsShape.parse(text)


def test_who_cannot_make_hosts_is_told_why(monkeypatch):
    monkeypatch.setattr("benchmarks.hosts.sys.platform", "linux")
    monkeypatch.setattr("benchmarks.hosts.shutil.which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr("benchmarks.hosts.os.geteuid", lambda: 1000)
    with pytest.raises(HostsError, match="need root: run as root, or leave --hosts out"), Hosts():
        pass
    monkeypatch.setattr("benchmarks.hosts.shutil.which", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(HostsError, match="tc not found: install iproute2"), Hosts():
        pass


@pytest.mark.usefixtures("can_make_hosts")
def test_hosts_are_joined_by_a_limited_cable():
    with Hosts(80_000_000) as hosts:
        assert "qdisc tbf" in output(hosts, 0, "tc", "qdisc", "show", "dev", INTERFACE)
        assert "rate 80Mbit" in output(hosts, 1, "tc", "qdisc", "show", "dev", INTERFACE)
        hosts.limit(None)
        hosts.limit(None)
        assert "tbf" not in output(hosts, 0, "tc", "qdisc", "show", "dev", INTERFACE)
        before = hosts.bytes_sent()
        message = "import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(bytes(1000), ('%s', 9))"
        output(hosts, 1, "python3", "-c", message % hosts.address(0))
        assert hosts.bytes_sent()[1] - before[1] >= 1000
        assert output(hosts, 0, "readlink", "/proc/self/ns/net") != output(hosts, 1, "readlink", "/proc/self/ns/net")
    assert all(name != INTERFACE for _, name in socket.if_nameindex())


@pytest.mark.usefixtures("can_make_hosts")
def test_nothing_is_left_after_a_failure():
    before = names()
    with contextlib.suppress(ZeroDivisionError), Hosts():
        assert len(names() - before) == 2
        raise ZeroDivisionError
    assert names() == before
    with pytest.raises(HostsError, match="tbf rate -1bit"), Hosts(-1):
        pass
    assert names() == before


@pytest.mark.usefixtures("can_make_hosts")
def test_what_killed_processes_left_is_removed():
    with subprocess.Popen(["true"]) as process:
        process.wait()
    subprocess.run(["ip", "netns", "add", f"rowmesh-{process.pid}-0"], check=True)
    with Hosts():
        assert f"rowmesh-{process.pid}-0" not in names()
