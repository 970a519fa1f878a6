"""Sends files by content: a file whose content the host already has, under any name, is not sent again.

A host stores contents in ``<folder>/.store/<digest>``. A run's folder has links to them, and to Stoker's own code,
which is unpacked once into ``.store/<digest>.code``: runs of the same code share the bytecode that Python compiles
there.
"""

from __future__ import annotations

import io
import os
import shlex
import tarfile
import time
from collections.abc import Sequence
from typing import IO

from stoker.cluster.sent_files import ARCHIVE, CODE, SentFile
from stoker.cluster.shell import Shell, quoted

STORE = ".store"
SENT = ".sent"  # in the run's folder: the lines of its files


def missing_script(folder: str) -> str:
    """Prints the digests on standard input that the host does not have."""
    store = f"{quoted(folder)}/{STORE}"
    return f"mkdir -p {store} && chmod 700 {store} && cd {store} && while read -r d; do [ -f $d ] || echo $d; done"


def link_script(folder: str, name: str) -> str:
    """Returns a script that links a run's files from the store: lines ``<digest> <path>`` on standard input.

    It first removes the files of an earlier submission of that name; what the run wrote stays.
    """
    home, code = f"{quoted(folder)}/{shlex.quote(name)}", f"../{STORE}/$code"
    return (
        f"mkdir -p {home}/logs && chmod 700 {home} && cd {home} && rm -rf {CODE} && "
        f"new=$(mktemp {SENT}-XXXXXX) && cat > $new && "
        f'{{ [ ! -f {SENT} ] || while IFS= read -r line; do p=./${{line#* }}; [ -d "$p" ] || rm -f "$p" || exit 1; '
        f"done < {SENT}; }} && mv -f $new {SENT} && "
        "code= && while IFS= read -r line; do "
        'd=${line%% *}; p=./${line#* }; mkdir -p "${p%/*}"; '
        f'[ "$p" != ./{ARCHIVE} ] || code=$d.code; '
        f'ln -f "../{STORE}/$d" "$p" 2>/dev/null || cp -f "../{STORE}/$d" "$p" || exit 1; done < {SENT} && '
        f'if [ -n "$code" ]; then if [ ! -d {code} ]; then t=$(mktemp -d ../{STORE}/code-XXXXXX) && '
        f"tar -xf {ARCHIVE} -C $t && {{ mv -T $t {code} 2>/dev/null || rm -rf $t; }}; fi; "
        f"[ -d {code} ] && ln -s {code} {CODE}; fi"
    )


def send(shell: Shell, files: Sequence[SentFile], folder: str, name: str) -> int:
    """Sends the files to ``<folder>/<name>`` of a host; returns the bytes that had to be sent.

    Raises:
        ShellFailed: the host cannot be reached, or the files do not arrive.
    """
    by_digest = {file.digest: file for file in files}
    wanted = "".join(f"{digest}\n" for digest in by_digest).encode()
    missing = [by_digest[digest] for digest in shell.run(missing_script(folder), given=wanted).decode().split()]
    accept = _bring(shell, missing, folder) if missing else ""
    lines = "".join(f"{file.digest} {file.path}\n" for file in files)
    shell.run(accept + link_script(folder, name), given=lines.encode())
    return sum(file.size for file in missing)


def _bring(shell: Shell, files: Sequence[SentFile], folder: str) -> str:
    """Sends contents to a temporary folder; returns the commands that move them to the store if they are complete."""
    store = f"{quoted(folder)}/{STORE}"
    inbox = shell.run(f"cd {store} && mktemp -d in-XXXXXX").decode().strip()
    shell.run(f"cd {store}/{inbox} && tar -xf -", given=lambda stdin: _write_archive(files, stdin))
    count = f'[ "$(ls | wc -l)" -eq {len(files)} ] || {{ echo "not all files have arrived" >&2; exit 1; }}'
    return f"( cd {store}/{inbox} && {count} && for f in *; do mv -f $f ../$f; done && cd .. && rmdir {inbox} ) && "


def _write_archive(files: Sequence[SentFile], to: IO[bytes]) -> None:
    """A tar archive of contents by digest."""
    with tarfile.open(fileobj=to, mode="w|") as archive:
        for file in files:
            info = tarfile.TarInfo(file.digest)
            info.mode = 0o444
            if file.source is None:
                info.size, info.mtime = file.size, time.time()
                archive.addfile(info, io.BytesIO(file.read()))
                continue
            with file.source.open("rb") as source:
                found = os.fstat(source.fileno())
                info.size, info.mtime = found.st_size, found.st_mtime
                archive.addfile(info, source)
