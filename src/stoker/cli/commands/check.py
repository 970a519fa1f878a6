"""Validate a job and print every resolved value with its source. Exit code 2 if the job is invalid."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stoker.cli.options.stage_options import add_stage_options, asks_for_stages
from stoker.cli.preflight import open_job, open_stages, with_planned_layout
from stoker.errors import Problem, UserError
from stoker.files import replace_file
from stoker.job import LoadedJob
from stoker.job.document.job_to_yaml import job_lines
from stoker.job.document.text_file import read_text
from stoker.job.keys.key_paths import KeyPath, dotted
from stoker.job.layout import layout_of
from stoker.job.stages import read_stages
from stoker.runs.resume_changes import resume_changes
from stoker.terminal import escape_control_characters, unescaped

REASON_COLUMN = 44  # column of the origins, unless a value is longer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``stoker check``."""
    parser.add_argument("job", nargs="?", metavar="JOB", help="the job file")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="keys of the job to override")
    parser.add_argument("--json", action="store_true", help="print the job, the origins and the errors as JSON")
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of job files, for editors")
    parser.add_argument(
        "--fix",
        action="store_true",
        help="update the file to this schema: its version, misspelt keys, keys of other tools",
    )
    add_stage_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Checks the job; returns 0 if it is valid, else 2."""
    if arguments.schema:
        from stoker.job.keys.editor_schema import editor_schema

        print(json.dumps(editor_schema(), indent=2))
        return 0
    if arguments.job is None:
        raise UserError(Problem("no job file is given", "write `stoker check job.yaml`"))
    try:
        if arguments.fix:
            _fix(arguments.job, to_stderr=arguments.json)
        if asks_for_stages(arguments.job, only=arguments.only, begin=arguments.begin):
            return _check_stages(arguments)
        loaded = with_planned_layout(open_job(arguments.job, arguments.overrides, "check"))
    except UserError as error:
        if not arguments.json:
            raise
        print(json.dumps(_answer(None, error.problems), indent=2))
        return error.exit_code
    changes = resume_changes(loaded, Path.cwd())
    if arguments.json:
        resume = {"resume": changes.as_json()} if changes else {}
        print(json.dumps(_answer(loaded, ()) | resume, indent=2))
    else:
        print_job(loaded)
        if changes and changes.refused:
            named = "; ".join(map(str, changes.refused))
            print(f"# {changes.folder} holds a run that does not resume with this job ({named})")
    return 0


def _check_stages(arguments: argparse.Namespace) -> int:
    """Checks the stages of a file; prints each as a job under its name."""
    staged = read_stages(arguments.job, arguments.overrides)
    chosen = staged.chosen(only=arguments.only, begin=arguments.begin)
    jobs = [with_planned_layout(loaded) for loaded in open_stages(chosen, "check")]
    if arguments.json:
        stages = [
            {"name": stage.name, "needs": dict(stage.needs), **_answer(loaded, ())}
            for stage, loaded in zip(chosen, jobs, strict=True)
        ]
        print(json.dumps({"ok": True, "stages": stages, "errors": []}, indent=2))
        return 0
    for stage, loaded in zip(chosen, jobs, strict=True):
        links = "".join(f"; {key}: {name}" for key, name in stage.needs.items())
        print("" if stage is chosen[0] else "\n", end="")
        print(f"# stage {stage.index + 1} of {len(staged.stages)}, {stage.name}{links}")
        print_job(loaded)
    return 0


def _answer(loaded: LoadedJob | None, problems: tuple[Problem, ...]) -> dict[str, Any]:
    origins = {} if loaded is None else loaded.origins
    plan = {"plan": loaded.plan} if loaded is not None and loaded.plan else {}
    return {
        "ok": loaded is not None,
        **plan,
        "job": None if loaded is None else loaded.job.model_dump(mode="json"),
        "origins": {key: asdict(origin) for key, origin in origins.items()},
        "errors": [asdict(problem) for problem in problems],
    }


def print_job(loaded: LoadedJob) -> None:
    """Prints the job as YAML lines, each with its value's origin: in colour on a terminal, plain when piped."""
    lines = list(job_lines(loaded.to_write()))
    column = max([REASON_COLUMN, *(len(line) + 2 for line, _ in lines if len(line) < 60)])
    terminal = sys.stdout.isatty()
    for line, path in lines:
        if path is None:
            print(f"{line:<{column - 2}}  # {_processes(loaded)}" if line == "parallel:" else line)
            continue
        origin, given = _origin_words(loaded, path)
        text = f"{line:<{column - 2}}  # {origin}"
        if terminal:
            left, right = (escape_control_characters(part) for part in (f"{line:<{column - 2}}", origin))
            text = f"{left}  \x1b[{36 if given else 2}m# {right}\x1b[0m"
        print(text, file=unescaped(sys.stdout) if terminal else None)


def _processes(loaded: LoadedJob) -> str:
    """Formats the layout, ``4 processes: data 2 (zero3) x tensor 2 + sequence``, and the planner's remark on it
    if any.
    """
    layout = layout_of(loaded.job)
    words = f"{layout.world} process{'es' * (layout.world > 1)}: {layout.describe()}"
    return f"{words}; {loaded.plan}" if loaded.plan else words


def _origin_words(loaded: LoadedJob, path: KeyPath) -> tuple[str, bool]:
    """Returns a leaf's origin for people, and whether the user wrote it."""
    origin = loaded.origins[dotted(path)]
    if origin.source == "default":
        resolved = f"{loaded.job.train.seq_len}: " if path == ("train", "seq_len") else ""
        return resolved + origin.why, False
    return (f"command line: {origin.where}" if origin.source == "override" else origin.where), True


def _fix(job: str, *, to_stderr: bool) -> None:
    """Replaces the file by the fixed one and prints the difference; changes nothing if there is nothing to fix."""
    from stoker.job.document.migrate import fix

    out = sys.stderr if to_stderr else sys.stdout
    before = read_text(job)
    after, changes = fix(before, job)
    if not changes:
        print(f"{job}: nothing to fix", file=out)
        return
    path = Path(job).resolve()
    if not path.is_file():
        raise UserError(Problem("only a file can be updated, and this is a pipe", "name the job file", file=job))
    raw = path.read_bytes()
    mark = b"\xef\xbb\xbf" if raw.startswith(b"\xef\xbb\xbf") else b""
    mode = path.stat().st_mode & 0o777
    replace_file(path, mark + after.encode("utf-8"))
    path.chmod(mode)
    difference = difflib.unified_diff(
        before.splitlines(), after.splitlines(), f"{job} (before)", f"{job} (after)", lineterm=""
    )
    print("\n".join(difference), file=out)
    for change in changes:
        print(f"fixed: {change}", file=out)
