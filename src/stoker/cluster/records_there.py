"""Records and secrets on other machines."""

from __future__ import annotations

import io
import os
import secrets
import shlex
import tarfile
from collections.abc import Mapping

from stoker.cluster.environment import ENVIRONMENT, environment_text, variables
from stoker.cluster.record import FILE, Record
from stoker.cluster.shell import Shell, quoted
from stoker.cluster.submission import SECRET, Submission
from stoker.job.targets.shared_keys import TargetKeys


def write_private(shell: Shell, path: str, content: bytes) -> None:
    """Writes a file that only its owner can read (mode 600).

    Args:
        path: as the shell reads it.
    """
    shell.run(f"umask 077 && rm -f {path} && cat > {path}", given=content)


def private_contents(submission: Submission, keys: TargetKeys) -> dict[str, bytes]:
    """Returns the files that only their owner may read: the channel's secret, the variables, the job's own secrets."""
    return {
        SECRET: secrets.token_hex(32).encode(),
        ENVIRONMENT: environment_text(variables(keys, os.environ)).encode(),
        **{file.path: file.source.read_bytes() for file in submission.private},
    }


def send_private(shell: Shell, home: str, files: Mapping[str, bytes]) -> None:
    """Writes files below a run's folder that only their owner can read (mode 600), all of them in one command.

    Args:
        home: the run's folder, as the shell reads it.
        files: contents by path.
    """
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path, content in files.items():
            info = tarfile.TarInfo(path)
            info.size, info.mode = len(content), 0o600
            tar.addfile(info, io.BytesIO(content))
    paths = shlex.join(files)
    shell.run(f"umask 077 && mkdir -p {home} && cd {home} && rm -f {paths} && tar -xof -", given=archive.getvalue())


def records_in(shell: Shell, folder: str) -> list[Record]:
    """Returns the records of submissions below a folder; files without a valid record are ignored."""
    home = quoted(folder)
    texts = shell.run(f"cd {home} 2>/dev/null && for f in */{FILE}; do cat \"$f\" 2>/dev/null && printf '\\0'; done; :")
    found = []
    for text in texts.split(b"\0")[:-1]:
        try:
            found.append(Record.from_json(text))
        except ValueError:
            continue
    return found
