"""Files of a job that only their owner may read: sent with mode 600, or refused where a target cannot do that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from stoker.cluster.chosen_target import ChosenTarget
from stoker.errors import UserError
from stoker.job.load_job import LoadedJob
from stoker.job.targets.shared_keys import TargetKeys
from stoker.runs.shared_secret import read_secret


@dataclass(frozen=True)
class PrivateFile:
    """A secret that a job names.

    Attributes:
        key: such as ``ranking.servers.secret``.
        value: the key's value.
        path: below the folder of the submission, with ``/``.
        source: the file here.
    """

    key: str
    value: str
    path: str
    source: Path


def checked_private(loaded: LoadedJob, files: Iterable[PrivateFile], chosen: ChosenTarget) -> tuple[PrivateFile, ...]:
    """Returns the private files that a target must be sent; none where its nodes see this machine's files.

    A target that cannot send files privately takes an absolute path as one on its nodes.

    Raises:
        UserError: the target cannot send a file privately, or others can read the file here.
    """
    keys = chosen.block
    assert isinstance(keys, TargetKeys)
    sent = []
    for file in files if not keys.in_place else ():
        if keys.instead_of_private:
            if not Path(file.value).is_absolute():
                message = f"`target: {chosen.kind}` cannot send {file.value} so that others cannot read it"
                raise UserError(loaded.problem(file.key, message, keys.instead_of_private))
            continue
        try:
            read_secret(file.source)
        except UserError as error:
            found = (
                loaded.problem(file.key, p.message.removeprefix("--secret "), p.suggestion) for p in error.problems
            )
            raise UserError(*found) from error
        sent.append(file)
    return tuple(sent)
