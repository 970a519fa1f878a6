"""Routes of a run's tools: evaluations, rollouts, files, stacks; forks, removal and its undoing."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.routing import Route

from stoker.files import no_link
from stoker.job.document.shorthand import expand_shorthands
from stoker.page.access.guard import account_of
from stoker.page.access.job_paths import (
    author_of_own_job,
    document_of,
    is_inside,
    new_job_problems,
    path_problems,
    refuse,
)
from stoker.page.access.mask_secrets import mask_secrets
from stoker.page.data_files.file_names import folder_name
from stoker.page.jobs.edit_job import apply_edits
from stoker.page.jobs.job_check import devices_of_job
from stoker.page.page_error import PageError, bad_request, http_error, not_found, passed_on
from stoker.page.processes.job_queue import ALIVE
from stoker.page.request_values import number_of, read_object, text_of
from stoker.page.routes.job_routes import kept_job, put_in_queue
from stoker.page.routing import Page, in_thread, route
from stoker.page.run_data.answer_views import chosen_steps, evaluation_figures, rollouts
from stoker.page.run_data.removed_runs import place_aside, put_aside, put_back, removed_runs
from stoker.page.run_data.run_index import id_of, is_run_file
from stoker.page.run_data.run_view import job_text, read_job
from stoker.runs.evaluations import read_evaluations
from stoker.runs.run_folder import RunFolder

ROLLOUT_SECONDS = 120.0
LISTED = 2000  # files
STACK_BYTES = 64 << 10
NOT_COPIED = (".lock", "logs", "tensorboard", "wandb", "mlflow", "chaos", "evaluations", "submission.json")
_OUTPUT = re.compile(r"^output:.*\n?", re.MULTILINE)
STORE = "checkpoint.to"
_STACK = re.compile(r"stack-(\d{1,6})\.txt")


def run_tools_routes(page: Page) -> list[Route]:
    """Returns the routes of a run's tools."""
    own = _RunTools(page)
    return [
        route("/api/runs/{id}/evaluations", in_thread(own.evaluations)),
        route("/api/runs/{id}/rollouts", own.rollouts),
        route("/api/runs/{id}/files", in_thread(own.files)),
        route("/api/runs/{id}/stacks", in_thread(own.stacks)),
        route("/api/runs/{id}/fork", own.fork, method="POST", role="run"),
        route("/api/runs/{id}/delete", in_thread(own.remove), method="POST", role="run"),
        route("/api/removed", in_thread(own.removed)),
        route("/api/removed/{name}/restore", in_thread(own.restore), method="POST", role="run"),
    ]


@dataclass(frozen=True)
class _RunTools:
    page: Page

    def evaluations(self, request: Request) -> Any:
        """Returns the evaluations that the run's folder keeps, oldest first."""
        kept = read_evaluations(self.page.run_of(request).path)
        return {"evaluations": list(evaluation_figures(kept)), "kept": [each.as_json() for each in kept]}

    async def rollouts(self, request: Request) -> Any:
        """Returns the answers of a step of ppo or grpo, token by token."""
        query = request.query_params
        folder = await run_in_threadpool(self.page.run_of, request)
        document = await run_in_threadpool(lambda: document_of(read_job(folder)))
        refuse(await run_in_threadpool(path_problems, document, self.page.settings, None))
        words = ["rollouts", self.page.settings.shown(folder.path)]
        if "step" in query:
            words += ["--step", str(number_of(query, "step"))]
        words += ["--limit", str(number_of(query, "limit", default=50, least=1, most=1000))]
        words += ["--worst"] if query.get("worst") in ("1", "true") else []
        result = await self.page.verbs.run([*words, "--json"], seconds=ROLLOUT_SECONDS)
        if not (found := result.fields):
            raise passed_on(400, result.last_line)
        command = shlex.join(["stoker", *words])
        steps = await run_in_threadpool(lambda: chosen_steps(self.page.views.series.of(folder.metrics).column("step")))
        return {"step": found["step"], "steps": steps, "rollouts": rollouts(found), "command": command}

    def files(self, request: Request) -> Any:
        """Returns names and sizes of the run's files, and its exports."""
        folder = self.page.run_of(request)
        found: list[dict[str, Any]] = []
        for place, folders, names in os.walk(folder.path):
            folders[:] = sorted(name for name in folders if not Path(place, name).is_symlink())
            for name in sorted(names):
                path = Path(place, name)
                if not path.is_symlink() and len(found) < LISTED:
                    short = str(path.relative_to(folder.path))
                    with suppress(OSError):  # a run that is at work deletes some
                        state = path.stat()
                        found.append({"name": short, "size": state.st_size, "modified": state.st_mtime})
        exported = [each for each in self.page.views.events(folder) if each.get("event") == "exported"]
        return {"folder": str(folder.path), "files": found, "exports": exported}

    def stacks(self, request: Request) -> Any:
        """Returns the stacks that the processes of a hung run wrote, by rank."""
        logs = self.page.run_of(request).path / "logs"
        found = []
        for path in sorted(logs.iterdir()) if logs.is_dir() and not logs.is_symlink() else ():
            rank = _STACK.fullmatch(path.name)
            if rank and not path.is_symlink():
                with open(path, "rb", opener=no_link) as file:
                    file.seek(max(0, os.fstat(file.fileno()).st_size - STACK_BYTES))
                    text = file.read().decode("utf-8", "replace")
                if text:  # a process that did not hang leaves an empty file
                    found.append({"rank": int(rank[1]), "text": text})
        return {"stacks": found}

    async def fork(self, request: Request) -> Any:
        """Forks a run: returns its job for editing, or starts a copy from the newest checkpoint."""
        body = await read_object(request)
        start = text_of(body, "from", default="job", most=20)
        if start not in ("job", "newest"):
            raise bad_request("`from` must be `job` or `newest`")
        folder, job = await run_in_threadpool(self._forked, request, start)
        given = text_of(body, "name", default="", most=200)
        name = folder_name(given) if given else self._free_name(folder)
        text = text_of(body, "yaml", default=job_text(folder) if job == folder.job else job.read_text("utf-8"))
        text = _OUTPUT.sub("", text)
        if start == "job":
            text = await run_in_threadpool(_without_store, text)
            if not account_of(request).may("admin"):
                text = mask_secrets(text)
            return {"yaml": text, "name": name, "command": f"cp {shlex.quote(str(job))} {name}.yaml"}
        account = account_of(request, "run")
        is_own = "yaml" not in body  # a run's own job does not decide that code may run, and its uploads were read
        trusted, problems_of = (author_of_own_job(account), path_problems) if is_own else (account, new_job_problems)
        refuse(await run_in_threadpool(lambda: problems_of(document_of(text), self.page.settings, trusted)))
        if await run_in_threadpool(_without_store, text) != text:
            what = "the checkpoints of {run} are in `{key}`, not in its folder"
            raise http_error(409, what, "fork its job, which starts at step 0", run=folder.path.name, key=STORE)
        to = self.page.settings.runs[0] / name
        if to.exists():
            raise http_error(409, "there is a run {run} already", "give another name", run=name)
        devices = await devices_of_job(self.page, text, trusted)
        return await run_in_threadpool(self._copy, folder, to, text, account, devices)

    def _forked(self, request: Request, start: str) -> tuple[RunFolder, Path]:
        """Returns the run that is forked, and its job; for editing, also a job of the queue that has no run itself."""
        try:
            folder = self.page.run_of(request)
            return folder, folder.job
        except PageError:
            for entry, _ in self.page.queued(request.path_params["id"]) if start == "job" else ():
                run, job = Path(entry.run), Path(entry.job)
                if is_inside(run, self.page.settings.runs) and is_run_file(job):
                    return RunFolder(run), job
            raise

    def _free_name(self, folder: RunFolder) -> str:
        """Returns the first name ``RUN-fork``, ``RUN-fork-2`` ... that no run has."""
        first = folder_name(f"{folder.path.name}-fork")
        names = itertools.chain([first], (f"{first}-{number}" for number in itertools.count(2)))
        return next(name for name in names if not (self.page.settings.runs[0] / name).exists())

    def _copy(self, folder: RunFolder, to: Path, text: str, account: Any, devices: int) -> Any:
        page, name = self.page, to.name
        with folder.take():
            partial = Path(mkdtemp(prefix=f".{name}.", suffix=".partial", dir=to.parent))  # of this copy alone
            leave_out = shutil.ignore_patterns(*NOT_COPIED)
            try:
                shutil.copytree(folder.path, partial, symlinks=True, ignore=leave_out, dirs_exist_ok=True)
                partial.rename(to)
            except OSError as error:
                shutil.rmtree(partial, ignore_errors=True)
                reason = str(error.strerror)
                raise http_error(409, "the copy {run} cannot be made: {reason}", run=name, reason=reason) from error
        job = kept_job(page.settings.state / "jobs", name, text)
        words = ["train", page.settings.shown(job), f"output={page.settings.shown(to)}"]
        command = f"{page.settings.line('cp', '-r', folder.path, to)} && {shlex.join(['stoker', *words])}"
        page.audit.write(account.name, "fork", command=command, run=str(to))
        entry = put_in_queue(page, words, run=to, job=job, user=account.name, devices=devices)
        page.runs.forget()
        return {"id": id_of(to), "number": entry.number, "command": command}

    def remove(self, request: Request) -> Any:
        """Moves a run, or a job with all its stages, aside, from where it can be moved back."""
        folder = self.page.folder_of(request.path_params["id"])
        job = self.page.job_of(folder.path)
        if job is not None and job[1].state in ALIVE:
            raise http_error(409, "a job is training in {run}, or waits to", "stop it first", run=Path(job[0].run).name)
        if not folder.path.is_dir():
            raise not_found("there is no run of this id", "GET /api/runs lists them")
        root = next(root for root in self.page.settings.runs if folder.path.is_relative_to(root))
        if folder.path == root:
            raise http_error(409, "this folder is one of the page's run folders", "remove it on the command line")
        aside = place_aside(folder, root)
        command = self.page.settings.line("mv", folder.path, aside)
        self.page.audit.write(account_of(request, "run").name, "delete", command=command, run=str(folder.path))
        put_aside(folder, aside)
        self.page.runs.forget()
        return {"command": command, "undo": aside.name}

    def removed(self, _: Request) -> Any:
        """Returns the runs that were moved aside."""
        found = [run.folder.name for run in removed_runs(self.page.settings.runs)]
        return {"runs": [{"undo": name, "name": name.rpartition("@")[0]} for name in found]}

    def restore(self, request: Request) -> Any:
        """Moves a run back."""
        name = request.path_params["name"]
        run = next((run for run in removed_runs(self.page.settings.runs) if run.folder.name == name), None)
        if run is None:
            raise not_found("there is no removed run of this name", "GET /api/removed lists them")
        to = run.origin
        if not is_inside(to, (run.root,)):
            raise http_error(403, "{path} is not below a run folder of this page", path=str(to))
        if to.exists():
            raise http_error(409, "a run named {run} exists", "rename that one first", run=to.name)
        command = self.page.settings.line("mv", run.folder, to)
        self.page.audit.write(account_of(request, "run").name, "restore", command=command, run=str(to))
        put_back(run)
        self.page.runs.forget()
        return {"id": id_of(to), "command": command}


def _without_store(text: str) -> str:
    """Returns a job whose checkpoints are kept in the folder of its run: two runs must not share `checkpoint.to`."""
    block = expand_shorthands(document_of(text)).data.get("checkpoint")
    return apply_edits(text, [(STORE, None)]) if isinstance(block, dict) and block.get("to") is not None else text
