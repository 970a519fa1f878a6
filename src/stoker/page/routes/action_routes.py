"""Routes of actions: evaluations, exports, submissions; and of runs that were submitted to other machines."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.routing import Route

from stoker.page.access.guard import account_of
from stoker.page.access.job_paths import author_of_own_job, document_of, new_job_problems, path_problems, refuse
from stoker.page.access.mask_secrets import mask_secrets
from stoker.page.actions import VERBS, Actions, Asked, StartedVerb
from stoker.page.page_error import bad_request, http_error
from stoker.page.processes.detached_process import DetachedProcess
from stoker.page.processes.run_verb import printed_json
from stoker.page.request_values import number_of, read_object, text_of
from stoker.page.routes.job_routes import kept_job
from stoker.page.routing import Page, in_thread, route
from stoker.page.run_data.run_view import read_job

OUTPUT = 256 << 10  # bytes of an action's output in one answer
RESULT = 64 << 20  # bytes of an action's JSON
LISTED = 200
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?")  # of a submitted run
TARGETS_SECONDS = 60.0


def action_routes(page: Page) -> list[Route]:
    """Returns the routes of actions."""
    own = _ActionRoutes(page, Actions(page))
    return [
        route("/api/actions", own.begin, method="POST", role="run"),
        route("/api/actions", in_thread(own.all)),
        route("/api/actions/{id}", in_thread(own.one)),
        route("/api/actions/{id}", in_thread(own.stop), method="DELETE", role="run"),
        route("/api/targets", in_thread(own.targets)),
        route("/api/submitted", own.submitted),
    ]


@dataclass(frozen=True)
class _ActionRoutes:
    page: Page
    actions: Actions

    async def begin(self, request: Request) -> Any:
        """Starts a verb, and returns at once."""
        body = await read_object(request)
        name = text_of(body, "verb", most=40)
        verb = VERBS.get(name)
        if verb is None:
            raise bad_request("there is no action {name}", "take one of {known}", name=name, known=", ".join(VERBS))
        options = body.get("options", {})
        if not isinstance(options, dict):
            raise bad_request("`options` must be an object")
        account = account_of(request, verb.role)
        action = await run_in_threadpool(self._begin, name, body, options, account)
        return {"id": action.id, "command": action.command, "to": action.to}

    def _begin(self, name: str, body: dict[str, Any], options: dict[str, Any], account: Any) -> StartedVerb:
        page, subject, run = self.page, "", None
        kind = VERBS[name].subject
        key = text_of(body, "run", default="", most=200)
        if kind == "run" or (kind == "job" and "yaml" not in body):
            run = page.runs.find(key)
            author = None if kind == "run" else author_of_own_job(account)
            refuse(path_problems(document_of(read_job(run)), page.settings, author))
        asked = Asked(page, account, run.path if run is not None else None)
        if kind == "run" and run is not None:
            subject = page.settings.shown(run.path)
        elif kind == "job":
            text = text_of(body, "yaml") if run is None else read_job(run)
            if run is None:
                refuse(new_job_problems(document_of(text), page.settings, account))
            subject = page.settings.shown(kept_job(page.settings.state / "jobs", name, text))
        elif kind == "name":
            subject = text_of(body, "name", most=60)
            if not NAME.fullmatch(subject):
                raise bad_request("`name` is not the name of a submitted run", "GET /api/submitted lists them")
        return self.actions.begin(name, asked, subject, key if run is not None else "", options)

    def all(self, _: Request) -> Any:
        """Returns the actions, the newest first."""
        return {"actions": [_summary(action, process) for action, process in self.actions.all()[:LISTED]]}

    def one(self, request: Request) -> Any:
        """Returns an action with its output, and its JSON once it has ended."""
        action, process = self.actions.find(request.path_params["id"])
        offset = number_of(request.query_params, "offset", default=-1, least=-1)
        stderr, end = process.output("err", offset=offset, most=OUTPUT)
        out, _ = process.output("out", most=RESULT)
        has_ended = process.state in ("ended", "lost")
        answer = printed_json(out) if has_ended else None
        is_json = answer is not None or (not has_ended and "--json" in VERBS[action.verb].fixed)
        text = stderr if is_json else out[-OUTPUT:] + stderr
        return {**_summary(action, process), "output": mask_secrets(text), "offset": end, "json": mask_secrets(answer)}

    def stop(self, request: Request) -> Any:
        """Ends an action."""
        action, process = self.actions.find(request.path_params["id"])
        account = account_of(request, "run")
        if process.process is None:
            raise http_error(409, "the action has ended already")
        self.page.audit.write(account.name, "stop action", id=action.id, of=action.command)
        process.stop()
        return {"command": ""}

    def targets(self, _: Request) -> Any:
        """Returns the names and kinds of the targets in targets.yaml, and nothing else from it."""
        from stoker.cluster.chosen_target import targets_file
        from stoker.job.document.yaml_document import read_document
        from stoker.job.targets import KINDS

        file = targets_file()
        data = read_document(file).data if file.is_file() else {}
        found = [
            {"name": str(name), "kind": next((kind for kind in KINDS if isinstance(block, dict) and kind in block), "")}
            for name, block in data.items()
        ]
        return {"targets": found, "kinds": list(KINDS)}

    async def submitted(self, _: Request) -> Any:
        """Returns the runs that were submitted, with their states."""
        result = await self.page.verbs.run(["runs", "--submitted", "--json"], seconds=TARGETS_SECONDS)
        keep = ("name", "kind", "on", "time", "nodes", "devices", "output", "status")
        rows = result.answer if isinstance(result.answer, list) else []
        return {"runs": [{key: row.get(key) for key in keep} for row in rows], "command": "stoker runs --submitted"}


def _summary(action: StartedVerb, process: DetachedProcess) -> dict[str, Any]:
    begun, ended = process.times()
    state = process.state
    ending = "done" if process.code == 0 else "stopped" if process.was_stopped else "failed"
    words = {"waiting": "starting", "lost": "failed", "ended": ending}
    return {**asdict(action), "status": words.get(state, state), "code": process.code, "begun": begun, "ended": ended}
