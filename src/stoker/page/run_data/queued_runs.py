"""Runs with the state of their job in the queue, and jobs of the queue that have no run yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stoker.page.access.job_paths import is_inside
from stoker.page.access.mask_secrets import mask_secrets
from stoker.page.processes.detached_process import DetachedProcess
from stoker.page.processes.job_queue import ALIVE, QueuedJob
from stoker.page.routing import Page
from stoker.page.run_data.removed_runs import removed_runs
from stoker.page.run_data.run_health import KILLED
from stoker.page.run_data.run_index import id_of, is_run_file
from stoker.page.run_data.stage_views import WAITING, job_folder, stages_below

OF_STAGE = ("task", "model", "loss", "held_out_loss", "seconds_left")  # of the stage that its job is at
Queued = tuple[QueuedJob, DetachedProcess] | None


def all_runs(page: Page) -> list[dict[str, Any]]:
    """Returns all runs, and jobs without a run yet: those that train by their start, then the newest first."""
    jobs = {entry.run: (entry, process) for entry, process in page.queue.entries()}  # the newest of each folder
    runs: dict[str, dict[str, Any]] = {}
    for key, folder in page.runs.all().items():
        root = job_folder(folder.path)
        queued = jobs.get(str(root)) or jobs.get(str(folder.path))
        summary = page.views.summary(folder)
        runs[key] = summary | {"status": _status(summary, queued)} | _stage_of(folder.path, root, queued)
    for entry, process in jobs.values():
        key = id_of(Path(entry.run))
        if key not in runs and (found := _job_summary(page, entry, process)) is not None:
            runs[key] = found
    return sorted(runs.values(), key=_place)


def job_detail(page: Page, entry: QueuedJob, process: DetachedProcess) -> dict[str, Any] | None:
    """Returns a job without a run of its own, which may have stages; None if it is not shown."""
    run, job = Path(entry.run), Path(entry.job)
    if (found := _job_summary(page, entry, process)) is None:
        return None
    return {
        **found,
        **_place_in_queue(page, entry, found["status"]),
        "job": mask_secrets(job.read_text(encoding="utf-8") if is_run_file(job) else ""),
        "command": entry.command,
        "stopping": page.stops.has(run),
        "health": [],
        "lineage": None,
        "metrics": [],
    }


def _job_summary(page: Page, entry: QueuedJob, process: DetachedProcess) -> dict[str, Any] | None:
    """Returns the summary of a job without a run of its own, with its ``stages``; None if it is not shown."""
    run = Path(entry.run)
    stages = stages_below(run, page.views.events) if is_inside(run, page.settings.runs) else []
    has_begun = any(stage["status"] != WAITING for stage in stages)
    if not has_begun and not _is_shown(page, entry, process):
        return None
    found = {**_without_run(entry, process), "stages": stages}
    if not has_begun:
        return found
    stage = next((each for each in stages if each["status"] != "done"), stages[-1])
    folder = page.runs.all().get(stage["id"])
    now = page.views.summary(folder) if folder is not None else {"task": stage["task"]}
    shown = {key: now[key] for key in OF_STAGE if key in now}
    return found | shown | _progress(stages, process) | {"stage": stage["name"]}


def _stage_of(run: Path, root: Path, queued: Queued) -> dict[str, Any]:
    """Returns {stage_of} of a stage's run: the job's name and id; without an id if it is not a job of this page."""
    if root == run:
        return {}
    is_queued = queued is not None and queued[0].run == str(root)
    return {"stage_of": {"id": id_of(root) if is_queued else "", "name": root.name}}


def _is_shown(page: Page, entry: QueuedJob, process: DetachedProcess) -> bool:
    """Returns whether a job without a run is shown: it waits, starts or failed, and its run was not removed."""
    run, roots = Path(entry.run), page.settings.runs
    if not is_inside(run, roots):  # another page with the same folder of state started it
        return False
    if process.state in ALIVE:
        return True
    return process.code != 0 and not any(
        gone.origin.is_relative_to(run) and gone.time > entry.time for gone in removed_runs(roots)
    )


def with_status(page: Page, summary: dict[str, Any]) -> dict[str, Any]:
    """Returns a run whose job may wait, may be starting again, or was asked to stop."""
    run = Path(summary["folder"])
    root, queued = job_folder(run), page.job_of(run)
    status = _status(summary, queued)
    if status in ("queued", "starting") and "health" in summary:  # it goes on by itself
        summary = summary | {"health": [each for each in summary["health"] if each["key"] != KILLED]}
    place = {} if queued is None else _place_in_queue(page, queued[0], status)
    found = summary | {"status": status, "stopping": page.stops.has(run)} | place | _stage_of(run, root, queued)
    return found | ({"command": queued[0].command} if queued is not None and "command" in summary else {})


def _place_in_queue(page: Page, entry: QueuedJob, status: str) -> dict[str, Any]:
    """Returns {queue} of a job that waits: its place, and the names of the jobs that it begins after."""
    if status != "queued":
        return {}
    states = [(each, process.state) for each, process in page.queue.entries() if each.number < entry.number]
    before = [(each, state) for each, state in states if state in ALIVE]
    place = 1 + sum(state == "waiting" for _, state in before)
    return {"queue": {"place": place, "after": [each.name for each, _ in before]}}


def _place(run: dict[str, Any]) -> tuple[bool, float]:
    """Returns the place of a run in the list; runs that train do not change theirs with each step."""
    is_running = run["status"] == "running"
    return not is_running, -((run["started"] if is_running else run["updated"]) or 0.0)


def _status(summary: dict[str, Any], queued: Queued) -> str:
    """Returns the status of a run whose process may be queued, or have begun and not written anything yet."""
    status = str(summary["status"])
    if queued is None or (status == "done" and queued[0].run != summary["folder"]):  # a stage that is done stays so
        return status
    process, state = queued[1], queued[1].state
    if state == "waiting":
        return "queued"
    begun = process.times()[0] or 0.0
    if state in ("starting", "running") and status != "running" and begun > (summary["updated"] or 0.0):
        return "starting"
    return status


def _without_run(entry: QueuedJob, process: DetachedProcess) -> dict[str, Any]:
    """Returns the summary of a job whose run has not begun."""
    state = process.state
    words = {"waiting": "queued", "starting": "starting", "running": "starting", "ended": "failed", "lost": "failed"}
    status = "done" if process.code == 0 else "stopped" if process.was_stopped else words[state]
    begun, ended = process.times()
    return {
        "id": id_of(Path(entry.run)),
        "name": entry.name,
        "folder": entry.run,
        "status": status,
        "task": "",
        "model": "",
        "step": 0,
        "steps": 0,
        "saved": None,
        "loss": None,
        "held_out_loss": None,
        "seconds_left": None,
        "started": begun,
        "updated": ended or begun or entry.time,
        "parents": [],
        "number": entry.number,
        "error": mask_secrets(process.output("err", offset=-1, most=4000)[0]) if status == "failed" else "",
    }


def _progress(stages: list[dict[str, Any]], process: DetachedProcess) -> dict[str, Any]:
    """Returns the status of a job with stages of which some have begun, and how many are done."""
    found = [stage["status"] for stage in stages]
    if process.state == "waiting":
        status = "queued"
    elif process.state in ALIVE or "running" in found:  # a job may also go on in a terminal
        status = "running"
    elif process.code == 0 or set(found) == {"done"}:
        status = "done"
    elif process.was_stopped or ("stopped" in found and "failed" not in found):
        status = "stopped"
    else:
        status = "interrupted" if process.state == "lost" and "failed" not in found else "failed"
    error = {} if status == "failed" else {"error": ""}
    return {"status": status, "step": found.count("done"), "steps": len(found), **error}
