"""Finds the hosts that do not see the folder of a run, before anything is sent."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from stoker.cluster.shell import Shell, ShellFailed, on_all

SEEN = 10  # timeout in seconds for a new file to appear on another host


def hosts_without(folder: str, shells: Sequence[Shell]) -> list[str]:
    """Returns the names of the hosts that do not see a folder of the first one.

    The first host writes a marker into the folder, or into the nearest existing one above it. The others look for the
    marker, and it is removed.

    Args:
        folder: in shell syntax.

    Raises:
        ShellFailed: the first host cannot write there, or one cannot be reached.
    """
    first, *others = shells
    marker = f".stoker-{os.urandom(8).hex()}"
    above = first.run(
        f'p={folder}; n=0; while [ ! -d "$p" ]; do p=$(dirname -- "$p"); n=$((n+1)); done; : > "$p/{marker}" && echo $n'
    )
    there = f'p={folder}; n={int(above)}; while [ $n -gt 0 ]; do p=$(dirname -- "$p"); n=$((n-1)); done; f=$p/{marker}'
    wait = f'while [ ! -e "$f" ] && [ $n -lt {2 * SEEN} ]; do sleep 0.5; n=$((n+1)); done'
    try:
        seen = on_all(others, lambda shell: shell.run(f'{there}; {wait}; [ ! -e "$f" ] || echo seen'))
    finally:
        with suppress(ShellFailed):
            first.run(f'{there}; rm -f -- "$f"')
    return [shell.name for shell, output in zip(others, seen, strict=True) if not output.strip()]
