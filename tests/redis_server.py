"""A server of Redis for tests: Debian's package redis-server, which `.ci/run` installs."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import redis


@contextmanager
def redis_server() -> Iterator[str]:
    """Its URL, within the block; nothing is written to the disk."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            with redis.Redis(port=port, socket_timeout=5) as client:
                deadline = time.monotonic() + 10
                while True:
                    try:
                        client.ping()
                        break
                    except redis.ConnectionError:
                        assert process.poll() is None and time.monotonic() < deadline, "redis-server did not start"
                        time.sleep(0.02)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.terminate()
