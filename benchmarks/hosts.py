"""Two hosts on one machine: network namespaces joined by a virtual cable of limited speed.

What runs in a namespace sees a network of its own, so that ranks of one namespace are one host to rowmesh, and talk to
the other one through the cable alone. A token bucket (`tc tbf`) on both ends limits each direction, as a network card
does; it delays nothing else and uses no processor.

Everything is inside the namespaces: removing them removes it. Needs Linux, root, and iproute2.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks.command import Report

NUM_HOSTS = 2
INTERFACE = "cable"
GIGABIT = 1_000_000_000
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": GIGABIT}
# Of an Ethernet frame of 1,514 bytes, which is what a token bucket counts, TCP with time stamps carries 1,448.
PAYLOAD_SHARE = 1448 / 1514
# A bucket lets its size through at once after a pause, so it must be small beside a message, and yet hold a segment as
# TCP hands it over (cutting that up would use the processor). The queue must hold what TCP keeps in flight.
_SEGMENT_BYTES = "16384"
_BUCKET = ["burst", "32kb", "latency", "200ms"]
_SETTINGS = {"tcp_congestion_control": "reno", "tcp_slow_start_after_idle": "0", "tcp_limit_output_bytes": "262144"}


class HostsError(RuntimeError):
    """Hosts cannot be made here; says why and what to do."""


@dataclass(frozen=True)
class HostsShape:
    """How many hosts, and ranks on each.

    Example:
        >>> HostsShape.parse("2x2")
        HostsShape(num_hosts=2, ranks_per_host=2)
    """

    num_hosts: int
    ranks_per_host: int

    @staticmethod
    def parse(text: str) -> HostsShape:
        """From `HxG`, or `H` where each host has one rank.

        Raises:
            HostsError: it is something else, or not two hosts.
        """
        match = re.fullmatch(r"(\d+)x([1-9]\d*)", text if "x" in text else f"{text}x1")
        if match is None or int(match[1]) != NUM_HOSTS:
            raise HostsError(f"--hosts {text}: a cable joins {NUM_HOSTS} hosts; give {NUM_HOSTS}xRANKS, such as 2x2")
        return HostsShape(int(match[1]), int(match[2]))

    @property
    def num_ranks(self) -> int:
        """Of all hosts."""
        return self.num_hosts * self.ranks_per_host


def bits_per_s(text: str) -> int:
    """A rate, in the units of `tc`.

    >>> bits_per_s("2.5gbit")
    2500000000
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text)
    if match is None or not (rate := round(float(match[1]) * _UNITS[match[2]])):
        raise argparse.ArgumentTypeError(f"{text!r} is no rate; give one such as 1gbit or 100mbit")
    return rate


class Hosts:
    """Two namespaces joined by a cable, for as long as the context lasts.

    Args:
        bits_per_s: of the cable, in each direction; None: unlimited.

    Raises:
        HostsError: on entering, where namespaces cannot be made.
    """

    def __init__(self, bits_per_s: int | None = GIGABIT) -> None:
        self._bits_per_s = bits_per_s
        self._names = [f"rowmesh-{os.getpid()}-{number}" for number in range(NUM_HOSTS)]
        self._ports = itertools.count(29500)

    def __enter__(self) -> Self:
        self._check()
        _remove_leftovers()
        try:
            for name in self._names:
                _run("ip", "netns", "add", name)
            first, second = self._names
            _run(
                "ip", "-n", first, "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", second
            )
            for host, name in enumerate(self._names):
                self._connect(host, name)
            self.limit(self._bits_per_s)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes the namespaces; what runs in them must have ended."""
        for name in self._names:
            with contextlib.suppress(HostsError):  # it may never have been made
                _run("ip", "netns", "del", name)

    def limit(self, bits_per_s: int | None) -> None:
        """Sets the speed of the cable in each direction; None: unlimited."""
        for name in self._names:
            if bits_per_s is None:
                with contextlib.suppress(HostsError):  # it may be unlimited already
                    _run("tc", "-n", name, "qdisc", "del", "dev", INTERFACE, "root")
            else:
                rate = ["tbf", "rate", f"{bits_per_s}bit", *_BUCKET]
                _run("tc", "-n", name, "qdisc", "replace", "dev", INTERFACE, "root", *rate)

    def address(self, host: int) -> str:
        """The IP address of a host."""
        return f"10.77.0.{host + 1}"

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """The command that runs a command on a host."""
        return ["ip", "netns", "exec", self._names[host], *command]

    def next_port(self) -> int:
        """A port without a listener."""
        return next(self._ports)

    def bytes_sent(self) -> list[int]:
        """What each host has sent over the cable so far, as its interface counts."""
        return [self._statistics(name)["tx"]["bytes"] for name in self._names]

    def _statistics(self, name: str) -> dict[str, Any]:
        return json.loads(_run("ip", "-n", name, "-s", "-j", "link", "show", INTERFACE))[0]["stats64"]

    def _connect(self, host: int, name: str) -> None:
        _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", INTERFACE)
        _run("ip", "-n", name, "link", "set", "dev", INTERFACE, "gso_max_size", _SEGMENT_BYTES, "up")
        for key, value in _SETTINGS.items():
            _run("ip", "netns", "exec", name, "sysctl", "-qw", f"net.ipv4.{key}={value}")

    def _check(self) -> None:
        if sys.platform != "linux":
            raise HostsError(f"network namespaces are a feature of Linux, this is {sys.platform}; leave --hosts out")
        missing = [tool for tool in ("ip", "tc", "sysctl") if shutil.which(tool) is None]
        if missing:
            raise HostsError(f"{' and '.join(missing)} not found: install iproute2 and procps, or leave --hosts out")
        if os.geteuid() != 0:
            raise HostsError("network namespaces need root: run as root, or leave --hosts out")


def enter_hosts(stack: ExitStack, report: Report, layout: str) -> Hosts | None:
    """Two hosts and an unlimited cable until the stack is left; where none can be made, None and a line that says why.

    SIGTERM leaves the stack too.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    stack.callback(signal.signal, signal.SIGTERM, before)
    try:
        return stack.enter_context(Hosts(None))
    except HostsError as error:
        report.line(hosts=layout, unavailable=str(error))
        return None


def _remove_leftovers() -> None:
    """Removes the namespaces of processes that were killed before they could."""
    for line in _run("ip", "netns", "list").splitlines():
        match = re.match(r"rowmesh-(\d+)-\d", line)
        if match and not Path(f"/proc/{match[1]}").exists():
            _run("ip", "netns", "del", match[0])


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HostsError(
            f"`{' '.join(command)}` failed: {done.stderr.strip()}; hosts need root with CAP_NET_ADMIN and "
            "CAP_SYS_ADMIN, and a kernel with veth and tbf; leave --hosts out where there is none"
        )
    return done.stdout
