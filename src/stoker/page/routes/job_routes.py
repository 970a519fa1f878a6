"""Routes of jobs: recipes, keys, checks, starting, the queue, stopping."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.routing import Route

from stoker.job.document.yaml_document import JobDocument
from stoker.job.keys.suggest_key import nearest
from stoker.job.load_job import STAGES
from stoker.job.recipes import recipe_description, recipe_names, write_recipe
from stoker.job.task_spec import TASKS
from stoker.page.access.guard import account_of
from stoker.page.access.job_paths import document_of, is_inside, new_job_problems, refuse
from stoker.page.data_files.file_names import folder_name
from stoker.page.jobs.job_check import check_job_text, devices_wanted, resolved_keys
from stoker.page.jobs.job_keys import job_keys, recipe_text
from stoker.page.page_error import PageError, bad_request, http_error, not_found, problem_json
from stoker.page.processes.job_queue import ALIVE, QueuedJob, is_cancellable
from stoker.page.processes.run_verb import command_of
from stoker.page.request_values import number_of, read_object, text_of
from stoker.page.routing import Page, in_thread, route
from stoker.page.run_data.run_index import id_of
from stoker.page.run_data.stage_views import run_folders
from stoker.runs.lock_holder import ask_to_stop, holder_of
from stoker.runs.run_folder import RunFolder


def job_routes(page: Page) -> list[Route]:
    """Returns the routes of jobs."""
    own = _JobRoutes(page)
    return [
        route("/api/recipes", in_thread(own.recipes)),
        route("/api/recipes/{name}", in_thread(own.recipe)),
        route("/api/schema", in_thread(own.schema)),
        route("/api/check", own.check, method="POST", role="run"),
        route("/api/jobs", own.start, method="POST", role="run"),
        route("/api/queue", in_thread(own.queue)),
        route("/api/queue/{number}", in_thread(own.cancel), method="DELETE", role="run"),
        route("/api/runs/{id}/stop", own.stop, method="POST", role="run"),
    ]


@dataclass(frozen=True)
class _JobRoutes:
    page: Page

    def recipes(self, _: Request) -> Any:
        """Returns the names and descriptions of all recipes."""
        return {"recipes": [{"name": name, "description": recipe_description(name)} for name in recipe_names()]}

    def recipe(self, request: Request) -> Any:
        """Returns a recipe: short, and with every key explained."""
        name = request.path_params["name"]
        if name not in recipe_names():
            near = nearest(name[:80], recipe_names())
            known = near or ", ".join(recipe_names())
            raise not_found("there is no recipe {name}", "take {known}", name=name[:80], known=known)
        full = write_recipe(name)
        text = recipe_text(name)
        stages = [{"name": each["name"], "task": each["task"]} for each in document_of(text).data.get(STAGES, [])]
        return {"name": name, "yaml": text, "full": full, "stages": stages, "command": f"stoker new {name}"}

    def schema(self, request: Request) -> Any:
        """Returns the keys of a job; with a task, without those of other tasks."""
        task = request.query_params.get("task", "")
        if task and task not in TASKS:
            raise not_found("there is no task {name}", "take one of {known}", name=task[:80], known=", ".join(TASKS))
        others = {name for name in TASKS if name != task} if task else set()
        return {"keys": [key for key in job_keys() if key["path"].split(".")[0] not in others], "tasks": list(TASKS)}

    async def check(self, request: Request) -> Any:
        """Returns the result of `stoker check` for a job."""
        body = await read_object(request)
        text = text_of(body, "yaml")
        problems, answer = await check_job_text(self.page, text, account_of(request))
        stages = answer.get("stages") or []
        return {
            "ok": not problems,
            "problems": [problem_json(problem) for problem in problems],
            "resolved": resolved_keys(answer),
            "stages": [{"name": s["name"], "needs": s["needs"], "resolved": resolved_keys(s)} for s in stages],
            "plan": answer.get("plan", ""),
            "command": "stoker check job.yaml",
        }

    async def start(self, request: Request) -> Any:
        """Starts a job, or puts it into the queue."""
        body = await read_object(request)
        text, name = text_of(body, "yaml"), text_of(body, "name", default="", most=200)
        account = account_of(request, "run")
        document = await run_in_threadpool(document_of, text)
        refuse(await run_in_threadpool(new_job_problems, document, self.page.settings, account))
        run, override = self._output(document, name)
        problems, answer = await check_job_text(self.page, text, account, overrides=override)
        if problems:
            raise PageError(400, problems[0])
        return await run_in_threadpool(self._enqueue, text, run, override, account.name, devices_wanted(answer))

    def _enqueue(self, text: str, run: Path, override: list[str], user: str, devices: int) -> Any:
        page = self.page
        if RunFolder(run).is_taken():
            raise http_error(409, "a job is training in {run}", "give another name", run=run.name)
        path = kept_job(page.settings.state / "jobs", run.name, text)
        words = ["train", page.settings.shown(path), *override]
        try:
            entry = put_in_queue(page, words, run=run, job=path, user=user, devices=devices)
        except PageError:
            path.unlink()
            raise
        page.audit.write(user, "train", command=entry.command, run=str(run))
        page.runs.forget()
        return {"id": id_of(run), "number": entry.number, "command": entry.command}

    def _output(self, document: JobDocument, name: str) -> tuple[Path, list[str]]:
        """Returns the folder of a job's run, and the override that sets it.

        Raises:
            PageError: it has a run already.
        """
        settings = self.page.settings
        given = document.data.get("output") if isinstance(document.data, dict) else None
        if name or not isinstance(given, str):
            run = settings.runs[0] / folder_name(name or "job")
            number = 2
            while not name and run.exists():
                run, number = settings.runs[0] / f"job-{number}", number + 1
            override = [f"output={settings.shown(run)}"]
        else:
            run, override = (settings.base / given).resolve(), []
        if not is_inside(run, settings.runs):
            raise bad_request("{path} is not below a run folder of this page", "omit `output`", path=str(run))
        if run.exists():
            hint = "give another name, or open that run under Train and press Go on"
            raise http_error(409, "there is a run {run} already", hint, run=run.name)
        return run, override

    def queue(self, _: Request) -> Any:
        """Returns the waiting and training jobs, and the outcomes of earlier ones."""
        entries = self.page.queue.entries()
        if any(process.state == "waiting" for _, process in entries) and not self.page.queue.has_starter():
            self.page.queue.start_starter()
        return {
            "jobs": [
                {
                    "number": entry.number,
                    "name": entry.name,
                    "id": id_of(Path(entry.run)),
                    "state": process.state,
                    "code": process.code,
                    "command": entry.command,
                    "user": entry.user,
                    "time": entry.time,
                }
                for entry, process in entries
            ]
        }

    def cancel(self, request: Request) -> Any:
        """Takes a job out of the queue that waits, or that has ended before its run began."""
        number = number_of(request.path_params, "number", least=1, most=10**9)
        account = account_of(request, "run")
        entries = self.page.queue.entries()
        job, process = next((each for each in entries if each[0].number == number), (None, None))
        has_begun = job and any(run.path.is_relative_to(job.run) for run in self.page.runs.all().values())
        earlier: list[int] = []  # of an ended job: its earlier tries, which would be listed in its place
        if job is not None and process is not None and process.state != "waiting":
            earlier = [each.number for each, _ in entries if each.run == job.run and each.number < number]
        is_waiting = process is not None and is_cancellable(process, ended=not has_begun)
        if is_waiting:
            self.page.audit.write(account.name, "cancel", number=number)
        if not is_waiting or not self.page.queue.cancel(number, ended=not has_begun):
            hint = "a job that trains is stopped: POST /api/runs/ID/stop"
            raise http_error(409, "no job {number} waits", hint, number=number)
        for each in earlier:
            self.page.queue.cancel(each, ended=True)
        return {"command": ""}

    async def stop(self, request: Request) -> Any:
        """Asks a run to end after its step, with a checkpoint; removes a waiting job from the queue.

        A second request is refused unless it has ``now``: the run then ends without a checkpoint.
        """
        body = await read_object(request)
        account = account_of(request, "run")
        key, now = request.path_params["id"], body.get("now") is True
        return await run_in_threadpool(self._stop, key, account.name, now=now)

    def _stop(self, key: str, user: str, *, now: bool) -> Any:
        page = self.page
        path = page.folder_of(key).path
        job = page.job_of(path)
        alive = job if job is not None and job[1].state in ALIVE else None
        if alive:
            path = Path(alive[0].run)  # a stage is stopped with its whole job, which may wait in the queue
        command = page.settings.line("stoker", "stop", path)
        if page.stops.has(path) and not now:
            hint = "wait for its step and checkpoint, or stop it at once"
            raise http_error(409, "{run} is stopping", hint, run=path.name)
        if now:
            page.stops.wait(path)
        process = next(filter(None, map(holder_of, run_folders(path))), None)
        if process is not None or alive:
            page.audit.write(user, "stop", command=command, run=str(path))
        if process is not None:
            if not ask_to_stop(process):
                raise http_error(409, "another user of this machine trains {run}", run=path.name)
        elif not alive or not page.queue.stop(alive[0].number):
            raise http_error(409, "{run} is not training here", run=path.name)
        asked = process or (alive[1].process if alive else None)
        if asked is not None:
            page.stops.add(asked)
        page.runs.forget()
        return {"command": command, "gone": not path.exists()}


def put_in_queue(
    page: Page, words: list[str], *, run: Path, job: Path, user: str, devices: int, cwd: Path | None = None
) -> QueuedJob:
    """Adds the command `stoker WORDS` to the end of the queue, as the job of a run."""
    command, name = shlex.join(["stoker", *words]), run.name
    base = cwd or page.settings.base
    return page.queue.add(
        command_of(words), cwd=base, run=run, job=job, command=command, user=user, name=name, devices=devices
    )


def kept_job(folder: Path, name: str, text: str) -> Path:
    """Writes a job to a new file, ``NAME-N.yaml``, which two concurrent requests cannot share."""
    number = 1
    while True:
        path = folder / f"{name}-{number}.yaml"
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            number += 1
        else:
            return path
