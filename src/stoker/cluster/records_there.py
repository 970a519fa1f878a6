"""Records and secrets on other machines."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from stoker.cluster.private_files import PrivateFile
from stoker.cluster.record import FILE, Record
from stoker.cluster.send import quoted
from stoker.cluster.shell import Shell


def write_private(shell: Shell, path: str, content: bytes) -> None:
    """Writes a file that only its owner can read (mode 600).

    Args:
        path: as the shell reads it.
    """
    shell.run(f"umask 077 && rm -f {path} && cat > {path}", given=content)


def send_private(shell: Shell, home: str, files: Iterable[PrivateFile]) -> None:
    """Writes private files below a run's folder.

    Args:
        home: the run's folder, as the shell reads it.
    """
    for file in files:
        if "/" in file.path:
            shell.run(f"umask 077 && mkdir -p {home}/{shlex.quote(file.path.rpartition('/')[0])}")
        write_private(shell, f"{home}/{shlex.quote(file.path)}", file.source.read_bytes())


def records_in(shell: Shell, folder: str) -> list[Record]:
    """Returns the records of submissions below a folder; files without a valid record are ignored."""
    home = quoted(folder)
    paths = shell.run(f'cd {home} 2>/dev/null && for f in */{FILE}; do [ -f "$f" ] && echo "$f"; done; :')
    found = []
    for path in paths.decode().splitlines():
        try:
            found.append(Record.from_json(shell.run(f"cat {home}/{shlex.quote(path)}")))
        except ValueError:
            continue
    return found
