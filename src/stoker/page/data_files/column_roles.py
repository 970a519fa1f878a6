"""What the columns of a job's data are taken as, from the first rows of its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stoker.data.files.byte_streams import Check
from stoker.data.files.candidate_files import candidate_files
from stoker.data.files.readers import LOGS, data_suffix
from stoker.data.files.rows import Rejected
from stoker.data.formats.all_formats import FORMATS, taken_columns
from stoker.data.formats.detect_format import detect
from stoker.data.ranking.find_features import time_and_group
from stoker.data.ranking.likely_time import likely_time
from stoker.data.ranking.ranking_block import RankingBlock
from stoker.errors import UserError
from stoker.job.schema import Job
from stoker.job.task_spec import block_of_task, task_of
from stoker.page.data_files.first_rows import MOST_COLUMNS, decoded_rows

Row = dict[str, Any]


def column_roles(job: Job, base: Path, check: Check) -> list[dict[str, Any]]:
    """Returns {key, path, format, names, roles, proposed, ignore} of each source of a job that has files here.

    `roles` maps each role to a column, or to an empty text; `key` is that of the job under which other columns are
    written. `proposed` are columns for roles that have none, by their values; `ignore` those that a log's job leaves
    out. The sources of a click log have the same columns, so only the first one is returned.

    Args:
        base: the folder that relative paths start from.
        check: see `read_rows`.
    """
    found, task = [], task_of(job)
    for index, source in enumerate(job.data):
        rows = _rows(source.path, base, check)
        names = list(dict.fromkeys(name for row in rows for name in row))[:MOST_COLUMNS]
        if not names:
            continue
        one: dict[str, Any] = {"path": source.path, "names": names, "format": "", "proposed": {}, "ignore": []}
        if task.ranks:
            return [one | {"key": "ranking"} | _roles_of_log(job, names, rows)]
        try:
            format = source.format if source.format in FORMATS else detect(rows, source.columns, task.rows.kind(job))
        except UserError:
            continue  # the audit says so, and asks for the columns
        taken = taken_columns(rows, format, source.columns, prompts=task.rows.prompts)
        beside = {"prompt": ""} if "prompt" in FORMATS[format].aliases else {}
        found.append(one | {"key": f"data[{index}].columns", "format": format, "roles": taken | beside | taken})
    return found


def _rows(path: str, base: Path, check: Check) -> list[Row]:
    """Returns the first rows of a source; none if it has no file here, or none with named columns."""
    files = [file for file in candidate_files(path, base) if data_suffix(file) and data_suffix(file) not in LOGS]
    try:
        rows = decoded_rows(files[0], check) if files else []
    except UserError:
        return []
    return [row for row in rows if isinstance(row, dict) and not isinstance(row, Rejected)]


def _roles_of_log(job: Job, names: list[str], rows: list[Row]) -> dict[str, Any]:
    settings = block_of_task(job, RankingBlock)
    time, group = time_and_group(names, settings)
    label = {"label": settings.labels[0]} if len(settings.labels) == 1 else {}
    roles = {**label, "time": time, "group": group, "weight": settings.weight}
    likely = None if time else likely_time([name for name in names if name not in settings.labels], rows)
    return {
        "roles": {role: column if column in names else "" for role, column in roles.items()},
        "proposed": {"time": likely} if likely else {},
        "ignore": settings.ignore,
    }
