"""Finds the run that a command line names."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from stoker.errors import Problem, UserError
from stoker.files import irregular
from stoker.runs.run_folder import RunFolder
from stoker.runs.stage_runs import read_record


def find_run(path: str, base: Path) -> RunFolder:
    """Returns the run at a path, or of that name below ``runs/``.

    Raises:
        UserError: it does not exist, and the nearest is named; it is an exported folder, or that of a job with stages;
            or one of its files is not a regular file.
    """
    for candidate in (base / path, base / "runs" / path):
        folder = RunFolder(candidate)
        for file in (folder.job, folder.events, folder.metrics):
            if kind := irregular(file):
                raise UserError(f"{file} cannot be read: it is {kind}, not a file")
        if folder.job.is_file() and folder.events.is_file():
            return folder
    if stages := [stage["run"] for root in (base / path, base / "runs" / path) for stage in read_record(root)]:
        raise UserError(Problem(f"{path} has the runs of a job's stages", f"give one of them: {', '.join(stages)}"))
    found = [events for below in ("*", "*/*") for events in (base / "runs").glob(f"{below}/events.jsonl")]
    known = sorted(str(events.parent.relative_to(base)) for events in found)
    near = get_close_matches(path, known, 1, 0.3) or known[:1]
    if (base / path).is_file():
        raise UserError(f"{path} is a file; a run is a folder" + (f", such as {near[0]}" if near else ""))
    if (base / path / "config.json").is_file():
        hint = "give its run; `stoker eval` evaluates a model with --answers FILE or --tasks NAME"
        raise UserError(Problem(f"{path} is the folder of a model, not of a run", hint))
    if (base / path / "adapter_config.json").is_file():
        raise UserError(Problem(f"{path} is an exported adapter, not a run", "give its run"))
    raise UserError(
        f"there is no run {path}" + (f"; did you mean {near[0]}?" if near else "; `stoker train` makes one")
    )
