"""Finds files of an evaluation that the run was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.errors import UserError
from stoker.models.model_source import find_model
from stoker.node_cache.urls import is_url
from stoker.runs.find_run import find_run

if TYPE_CHECKING:
    from stoker.job.blocks.source_block import SourceBlock


def trained_files(run: str, data: str | None, base: Path) -> list[str]:
    """Returns the files of ``data`` with the content of a file in the run's job.

    Only files on this machine are compared. A model that is no run has none.
    """
    if data is None or find_model(run, base, or_run=True) is not None:
        return []
    from stoker.job.blocks.source_block import SourceBlock
    from stoker.job.load_job import load_job

    contents = _contents(SourceBlock(path=data), base)
    if not contents:
        return []
    trained = {
        value for block in load_job(find_run(run, base).job).job.data for value in _contents(block, base).values()
    }
    return [name for name, content in contents.items() if content in trained]


def trained_note(files: Sequence[str]) -> list[str]:
    """Returns the note about such files; none without files."""
    return [f"trained on: {', '.join(files)}; only rows that the run held out measure what it learnt"] if files else []


def _contents(block: SourceBlock, base: Path) -> dict[str, str]:
    from stoker.data.files.candidate_files import candidate_files
    from stoker.data.sources import open_source

    with suppress(UserError, OSError):
        if not is_url(block.path) and candidate_files(block.path, base):
            return open_source(block, base).contents()
    return {}
