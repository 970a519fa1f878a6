"""Sends files by content: a file whose content the host already has, under any name, is not sent again.

A host stores contents in ``<folder>/.store/<digest>``. A run's folder has links to them, and to Stoker's own code,
which is unpacked once into ``.store/<digest>.code``: runs of the same code share the bytecode that Python compiles
there.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import tarfile
import time
from collections.abc import Mapping, Sequence
from typing import IO

from stoker.cluster.sent_files import ARCHIVE, CODE, SentFile
from stoker.cluster.shell import Shell, ShellFailed, quoted

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


def receive_script(folder: str, count: int) -> str:
    """Returns a script that reads an archive of contents from standard input, and adds them to the store.

    They are unpacked beside it, so that the store has whole contents only; nothing is left where they do not arrive.
    """
    return (
        f"cd {quoted(folder)}/{STORE} && t=$(mktemp -d in-XXXXXX) || exit 1; "
        f'( cd $t && tar -xf - && {{ [ "$(ls | wc -l)" -eq {count} ] || {{ echo "not all files have arrived" >&2; '
        "exit 1; }; } && for f in *; do mv -f $f ../$f || exit 1; done ); code=$?; rm -rf $t; exit $code"
    )


def send(shell: Shell, files: Sequence[SentFile], folder: str, name: str) -> int:
    """Sends the files to ``<folder>/<name>`` of a host; returns the bytes that had to be sent.

    Raises:
        ShellFailed: the host cannot be reached, or the files do not arrive.
    """
    by_digest = {file.digest: file for file in files}
    wanted = "".join(f"{digest}\n" for digest in by_digest).encode()
    missing = [by_digest[digest] for digest in shell.run(missing_script(folder), given=wanted).decode().split()]
    lines = "".join(f"{file.digest} {file.path}\n" for file in files)
    try:
        if missing:
            script = receive_script(folder, len(missing))
            shell.run(script, given=lambda stdin: _write_archive(missing, stdin))
        shell.run(link_script(folder, name), given=lines.encode())
    except ShellFailed as error:
        raise ShellFailed(shell.name, error.code, _reason(error.stderr, by_digest)) from None
    return sum(file.size for file in missing)


def _reason(stderr: str, by_digest: Mapping[str, SentFile]) -> str:
    """Returns why files were not written: the first line of the errors, as tar has one for each file, with paths."""
    line = next(iter(stderr.splitlines()), "").removeprefix("tar: ")
    line = re.sub("Wrote only .* bytes", "the disk or a quota is full", line)
    for digest, file in by_digest.items():
        line = line.replace(digest, file.path)
    return line and f"the files cannot be written: {line}"


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
