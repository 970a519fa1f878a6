"""Integrity checks of a checkpoint's files: sizes first, then contents, split over the processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from stoker.checkpoint.dcp_file_layout import sum_of
from stoker.checkpoint.object_collectives import rank, run_on_all_ranks
from stoker.checkpoint.storage import Storage

Files = Mapping[str, Mapping[str, Any]]  # by name: ``bytes`` and ``sha256``, as ``state.json`` has them


def check_sizes(storage: Storage, step: int, files: Files) -> None:
    """Raises ValueError where a file is missing, has a different size, or does not belong to the checkpoint."""
    expected = {name: file["bytes"] for name, file in files.items()}
    if (found := storage.sizes(step)) != expected:
        odd = next(name for name in sorted({*expected, *found}) if found.get(name) != expected.get(name))
        raise ValueError(f"{odd} has {found.get(odd, 0)} bytes, and {expected.get(odd, 0)} were written")


def check_contents(storage: Storage, step: int, files: Files) -> None:
    """Reads every file once, each on one process. A collective.

    Raises:
        ValueError: a file's contents have changed; raised on every process.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1

    def check() -> None:
        for name in sorted(files)[rank() :: world]:
            with storage.open(step, name) as file:
                if sum_of(file) != files[name]["sha256"]:
                    raise ValueError(f"{name} has other contents than were written")

    run_on_all_ranks(check)
