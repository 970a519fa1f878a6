"""The table of actions: verbs that a user starts from the page, each with its allowed options.

An action runs detached, as a job does, in a folder below ``actions/``, and is found again by its id.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stoker.files import read_file, replace_file
from stoker.job.inputs import SCHEMA
from stoker.page.access.accounts import Account
from stoker.page.access.job_paths import allowed_folders, incomplete_problem, place_problem, refuse
from stoker.page.access.listed_urls import is_listed
from stoker.page.data_files.file_names import folder_name
from stoker.page.page_error import PageError, bad_request, http_error, not_found
from stoker.page.processes.detached_process import DetachedProcess
from stoker.page.processes.run_verb import command_of
from stoker.page.request_values import as_word
from stoker.page.routing import Page
from stoker.scoring.scorers import is_foreign

ID = re.compile(r"[0-9a-f]{16}")
AT_ONCE = 4
Option = Callable[["Asked", str, Any], list[str]]


@dataclass(frozen=True)
class Asked:
    """The user of an action, and its run."""

    page: Page
    account: Account
    run: Path | None


@dataclass(frozen=True)
class Verb:
    """A verb as an action.

    Attributes:
        subject: its argument: ``run``, ``job`` (the run's, or a given one), ``name`` (of a submitted run), or
            empty for none.
        options: the allowed ones, by the name in the request.
        fixed: arguments that are always appended.
        role: the required role.
    """

    subject: str
    options: Mapping[str, Option] = field(default_factory=dict)
    fixed: tuple[str, ...] = ()
    role: str = "run"


def _flag(_: Asked, name: str, value: Any) -> list[str]:
    if not isinstance(value, bool):
        raise bad_request("`{key}` must be true or false", key=name)
    return [f"--{name.replace('_', '-')}"] if value else []


def _word(_: Asked, name: str, value: Any) -> list[str]:
    return [f"--{name.replace('_', '-')}", as_word(name, value)]


def _number(_: Asked, name: str, value: Any) -> list[str]:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e12:
        raise bad_request("`{key}` must be a number", key=name)
    return [f"--{name.replace('_', '-')}", f"{value:.15g}" if isinstance(value, float) else str(value)]


def _path(asked: Asked, name: str, value: Any) -> list[str]:
    return [f"--{name.replace('_', '-')}", _allowed(asked, name, value)]


def _templates(asked: Asked, name: str, value: Any) -> list[str]:
    """Returns templates by name, stored in a file beside the jobs; or the path of such a file."""
    if not isinstance(value, dict):
        return _path(asked, name, value)
    if not 2 <= len(value) <= 50 or not all(isinstance(text, str) and len(text) < 100_000 for text in value.values()):
        raise bad_request("`{key}` must map names to at least two templates", key=name)
    text = json.dumps(value, ensure_ascii=False, sort_keys=True)
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    file = asked.page.settings.state / "jobs" / f"prompts-{digest}.json"
    replace_file(file, text.encode("utf-8", "replace"))
    return ["--prompts", asked.page.settings.shown(file)]


def _data(asked: Asked, name: str, value: Any) -> list[str]:
    """Returns the data to measure on: a name of the catalogue, a listed URL, or a file that may be read."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9][\w-]*", value):
        if (asked.page.settings.base / value).exists():
            return [_allowed(asked, name, value)]
        return [value]
    if isinstance(value, str) and is_listed(value, asked.page.settings.urls):
        return [value]
    return [_allowed(asked, name, value)]


def _words(asked: Asked, name: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not 0 < len(value) <= 50:
        raise bad_request("`{key}` must be a list of words", key=name)
    for each in value:
        text = each if isinstance(each, str) else ""
        if not text or len(text) > 300 or text.startswith("-") or not text.isprintable():
            raise bad_request("`{key}` contains an invalid entry", key=name)
        is_file = text.lower().endswith((".yaml", ".yml", ".json")) or text.startswith(SCHEMA)
        if is_file or ("/" in text and not text.startswith("offline/")):
            raise bad_request("`{key}` names a file, which the page does not read", "use the command line", key=name)
        if is_foreign(text) and not asked.account.may("admin"):
            raise http_error(
                403, "`{text}` runs code or contacts a server; this requires the role admin", text=text[:60]
            )
    return [f"--{name}", *value]


def _run(asked: Asked, name: str, value: Any) -> list[str]:
    if not isinstance(value, str):
        raise bad_request("`{key}` must be the id of a run", key=name)
    return [f"--{name}", asked.page.settings.shown(asked.page.runs.find(value).path)]


def _allowed(asked: Asked, name: str, value: Any) -> str:
    if not isinstance(value, str) or not value or value.startswith("-") or not value.isprintable():
        raise bad_request("`{key}` must be a file", key=name)
    settings = asked.page.settings
    problem = place_problem(value, settings.base, allowed_folders(settings)) or incomplete_problem(value, settings)
    refuse([problem] if problem else [])
    return value


VERBS: Mapping[str, Verb] = {
    "eval": Verb(
        "run",
        {
            "data": _data, "format": _word, "at": _word, "compare": _flag, "quantise": _word, "answers": _path,
            "score": _words, "tasks": _words, "prompts": _templates, "against": _run, "against_at": _word,
            "chat": _flag, "limit": _number, "temperature": _number, "seed": _number, "max_tokens": _number,
        },
        ("--json",),
    ),
    "export": Verb("run", {"format": _word, "dtype": _word, "quantise": _word, "at": _word}, ("--json",)),
    "verify": Verb("job", {"layouts": _word, "steps": _number}),
    "submit": Verb("job", {"on": _word, "name": _word, "dry_run": _flag}, role="admin"),
    "describe": Verb("name", {}, ("--json",)),
    "logs": Verb("name", {"rank": _number}),
    "stop": Verb("name", {}, role="admin"),
    "resume": Verb("name", {}, ("--json",), role="admin"),
    "calibrate": Verb("", {"seconds": _number}, ("--json",)),
}  # fmt: skip


@dataclass(frozen=True)
class StartedVerb:
    """A verb that was started.

    Attributes:
        run: the id of the run that it works on; empty for none.
        to: the folder that it writes; empty for none.
    """

    id: str
    verb: str
    run: str
    command: str
    user: str
    time: float
    to: str = ""


class Actions:
    """The actions of a page."""

    def __init__(self, page: Page) -> None:
        self._page, self._folder = page, page.settings.state / "actions"

    def begin(self, verb: str, asked: Asked, subject: str, run: str, options: Mapping[str, Any]) -> StartedVerb:
        """Starts a verb.

        Args:
            subject: its first word: a run's folder, a job file, a name; empty for none.
            run: the id of the run.

        Raises:
            PageError: there is no such action or option, or too many run.
        """
        words = [*(("plan", "--calibrate") if verb == "calibrate" else (verb,)), *([subject] if subject else [])]
        table = VERBS[verb].options
        for name, value in options.items():
            if verb == "export" and name == "to":
                continue
            if name not in table:
                known = ", ".join(table) or "-"
                raise bad_request(
                    "`{verb}` has no option {key}", "it has {known}", verb=verb, key=name[:40], known=known
                )
            words += table[name](asked, name, value)
        to = ""
        if verb == "export":
            to = self._export_folder(asked, options)
            words += ["--to", to]
        words += VERBS[verb].fixed
        command = shlex.join(["stoker", *(word for word in words if word != "--json")])
        if sum(process.state in ("starting", "running") for _, process in self.all()) >= AT_ONCE:
            raise http_error(429, "{n} actions are already running", retry_after=5, n=AT_ONCE)
        action = StartedVerb(
            id=secrets.token_hex(8),
            verb=verb,
            run=run,
            command=command,
            user=asked.account.name,
            time=round(time.time(), 3),
            to=to,
        )
        self._page.audit.write(asked.account.name, verb, command=command)
        process = DetachedProcess(self._folder / action.id)
        process.prepare(command_of(words), cwd=self._page.settings.base, env={"NO_COLOR": "1", "TERM": "dumb"})
        replace_file(process.folder / "action.json", json.dumps(asdict(action)))
        process.start()
        return action

    def _export_folder(self, asked: Asked, options: Mapping[str, Any]) -> str:
        """Returns a new folder below ``exports`` beside the runs, named by the request or the run."""
        assert asked.run is not None
        stem = f"{asked.run.name}-{as_word('format', options.get('format', 'merged'))}"
        if "to" in options:
            stem = str(options["to"])
            if (name := folder_name(stem)) != stem:
                raise bad_request(
                    "`{name}` cannot be the name of a folder", "write `{other}`", name=stem[:40], other=name
                )
        path, number = self._page.settings.runs[0] / "exports" / stem, 2
        while path.exists():
            path, number = path.with_name(f"{stem}-{number}"), number + 1
        return asked.page.settings.shown(path)

    def all(self) -> list[tuple[StartedVerb, DetachedProcess]]:
        """Returns all actions, the newest first."""
        found = []
        for place in self._folder.iterdir():
            with suppress(PageError):
                found.append(self.find(place.name))
        return sorted(found, key=lambda each: -each[0].time)

    def find(self, key: str) -> tuple[StartedVerb, DetachedProcess]:
        """Returns the action of an id.

        Raises:
            PageError: there is no such action.
        """
        if ID.fullmatch(key):
            with suppress(OSError, ValueError, TypeError):
                place = self._folder / key
                return StartedVerb(**json.loads(read_file(place / "action.json"))), DetachedProcess(place)
        raise not_found("there is no action of this id", "GET /api/actions lists them")
