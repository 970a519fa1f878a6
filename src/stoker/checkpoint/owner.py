"""The run that a place of checkpoints belongs to: two runs never write to one place.

A place that the job names (``checkpoint.to``) has a file ``run.json`` with the run that writes there. A run is
identified by its first event, so its folder can be moved.
"""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass

from stoker.checkpoint.storage import Storage
from stoker.errors import Problem, UserError
from stoker.runs.run_folder import RunFolder


@dataclass(frozen=True)
class Owner:
    """The contents of ``run.json``.

    Attributes:
        run: `RunFolder.identity` of the run.
        output, host: its folder and machine when it last started or resumed.
    """

    run: str
    output: str
    host: str

    @classmethod
    def of(cls, folder: RunFolder) -> Owner:
        return cls(folder.identity() or "", str(folder.path.resolve()), socket.gethostname())

    @classmethod
    def at(cls, storage: Storage) -> Owner | None:
        """Returns the owner of a place; None without one, or if the file is damaged."""
        try:
            return cls(**json.loads(storage.owner() or b""))
        except (ValueError, TypeError):
            return None


def check_owner(storage: Storage, folder: RunFolder) -> Owner | None:
    """Checks that no other run writes to this place. The caller has locked the run's folder.

    Returns:
        The owner of the place; see `Owner.at`.

    Raises:
        UserError: another run writes to it, or did.
    """
    owner, mine = Owner.at(storage), Owner.of(folder)
    # Another run that was in the same folder has ended, as the folder is locked.
    if owner is None or owner.run == mine.run or (owner.output, owner.host) == (mine.output, mine.host):
        return owner
    raise UserError(
        Problem(
            f"{storage.place} has the checkpoints of another run, {owner.output} on {owner.host}",
            "give each run a place of its own",
            key="checkpoint.to",
        )
    )


def claim_place(storage: Storage, folder: RunFolder) -> None:
    """Records that a run, which has its first event, writes to this place.

    Raises:
        UserError: another run has recorded it meanwhile.
    """
    before, mine = check_owner(storage, folder), Owner.of(folder)
    if before == mine:
        return
    content = json.dumps(asdict(mine)).encode()
    if before is not None and before.run == mine.run:
        with suppress(OSError):  # the run has moved; where its old folder is named, nobody else trains
            storage.claim(content, replaces=True)
        return
    try:
        storage.claim(content, replaces=before is not None)
    except FileExistsError:
        check_owner(storage, folder)
        storage.claim(content, replaces=True)  # the file is damaged
