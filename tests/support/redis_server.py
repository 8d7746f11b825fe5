"""A Redis of a test's own, on a free port of the loopback interface."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

START_S = 20.0


class RedisServer:
    """A server that can be killed and started again; what it acknowledged is on its disk.

    Attributes:
        url: for clients.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._process = folder, None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Starts it, and returns when it answers."""
        import redis

        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        command += ["--save", "", "--appendonly", "yes", "--appendfsync", "always"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s:
            with contextlib.suppress(redis.RedisError):
                self.client().ping()
                return
            time.sleep(0.02)
        raise TimeoutError(f"redis-server does not answer on port {self.port}")

    def client(self) -> Any:
        """A connection."""
        import redis

        return redis.Redis.from_url(self.url)

    def kill(self) -> None:
        """Ends it as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that runs; skips where there is none to start."""
    pytest.importorskip("redis", reason="the package redis is not installed")
    if shutil.which("redis-server") is None:
        pytest.skip("there is no redis-server; install it (apt-get install redis-server)")
    server = RedisServer(tmp_path)
    try:
        server.start()
        yield server
    finally:
        server.kill()
