"""The page's audit log: user, action, time, and the equivalent command. One JSON object a line."""

from __future__ import annotations

import json
import os
import shlex
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stoker.files import no_link
from stoker.runs.json_lines import read_lines

FILE = "audit.jsonl"


class AuditLog:
    """An append-only log file."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._lock = threading.Lock()

    def write(self, user: str, action: str, *, command: str = "", **values: Any) -> None:
        """Appends a line: before an action that ends, removes or changes something, so that none is without a line;
        after one that makes something whose name or command the line contains.
        """
        line = {"time": round(time.time(), 3), "user": user, "action": action, "command": command, **values}
        with self._lock, open(self.path, "ab", opener=no_link) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write((json.dumps(line, ensure_ascii=False) + "\n").encode())
            file.flush()

    def lines(self) -> Iterator[dict[str, Any]]:
        """Returns all lines, oldest first."""
        return read_lines(self.path)

    def script(self, base: Path, user: str = "") -> str:
        """Writes the actions that have a command as a shell script; of all users, or of one."""
        lines = ["#!/bin/sh", "set -e", f"cd {shlex.quote(str(base))}"]
        for line in self.lines():
            command = str(line.get("command", ""))
            if command and user in ("", line.get("user")):
                when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(float(line.get("time", 0))))
                lines += [f"# {when} UTC, {line.get('user', '')}: {line.get('action', '')}", command]
        return "\n".join(lines) + "\n"
