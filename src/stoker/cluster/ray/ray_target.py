"""``target: {ray: ...}``: Ray's job API, which runs `stoker.cluster.ray.driver` on the cluster."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from stoker.cluster.chosen_target import ChosenTarget
from stoker.cluster.environment import environment_text, variables
from stoker.cluster.log_files import POLL, of_rank
from stoker.cluster.ray.dashboard import answer_of, has_package, nodes_at, with_scheme
from stoker.cluster.ray.placement import Placement
from stoker.cluster.record import FILE, Record, newest_of
from stoker.cluster.secret_names import is_secret
from stoker.cluster.sent_files import ARCHIVE
from stoker.cluster.shell import python_word
from stoker.cluster.submission import JOB, Submission, path_on_nodes
from stoker.cluster.target import Status
from stoker.errors import CannotRun, Problem, RunFailed, UserError
from stoker.job.block import Auto, default_of
from stoker.job.targets.ray import RayBlock
from stoker.resilience.deadline import SIGNAL_EXIT

PLAN = "driver.json"
LARGEST = 500 * 2**20  # bytes that Ray takes as a job's folder (RAY_RUNTIME_ENV's limit of a package)
SECONDS_TO_END = SECONDS_TO_BEGIN = 60.0
SECONDS_TO_ANSWER = 5.0  # for a preview, which needs no cluster
NO_AGENT, TAKEN = "No available agent", "already exists"  # in errors of Ray
STATES = {"PENDING": "waiting", "RUNNING": "running", "SUCCEEDED": "done", "STOPPED": "stopped", "FAILED": "failed"}
WITHOUT_EFFECT = {
    "setup": "prepare the nodes where Ray is started",
    "port": "the supervisors choose their ports themselves",
}
SET_BY_RAY = "set it before `ray start` on the nodes"
LEFT_OUT_BY_RAY = (".gitignore", ".rayignore")
METADATA = "stoker"  # key of a Ray job's metadata, under which its record is


def open_target(chosen: ChosenTarget) -> RayTarget:
    """Returns the target of a block."""
    assert isinstance(chosen.block, RayBlock)
    return RayTarget(chosen, chosen.block)


class RayTarget:
    """A Ray cluster; see `stoker.cluster.target.Target`."""

    def __init__(self, chosen: ChosenTarget, block: RayBlock) -> None:
        self._chosen, self._block = chosen, block

    def host_count(self) -> int | None:
        return None

    def check(self, submission: Submission) -> None:
        self._no_secrets()
        for key, instead in WITHOUT_EFFECT.items():
            if getattr(self._block, key) != default_of(RayBlock, key):
                raise UserError(self._chosen.problem(key, f"`{key}` has no effect on Ray", instead))
        if submission.bytes > LARGEST:
            largest = max(submission.files, key=lambda file: file.size)
            message = f"Ray takes at most {LARGEST >> 20} MiB with a job, and {largest.path} has {largest.size >> 20}"
            hint = "put it where all nodes see it, and give its absolute path with `send` left empty, or a URL"
            raise UserError(self._chosen.problem("send", message, hint))
        client = self._client()
        nodes = self._known_nodes(client)
        if nodes is not None and (refusal := self._placement(submission, nodes).refusal(nodes)):
            raise CannotRun(self._chosen.problem("nodes", refusal, "lower `nodes`, `devices`, `cpus` or `resources`"))

    def preview(self, submission: Submission) -> str:
        self._no_secrets()
        shown = environment_text(self._variables(), hidden=True)
        lines = [
            f"# {submission.label} to Ray at {self._address()}",
            f"RAY_API_SERVER_ADDRESS={self._address()} ray job submit --working-dir SENT -- {self._entry}",
            "",
            "# SENT holds:",
            *(f"#   {file.summary}" for file in submission.files),
            f"#   {PLAN}:",
            *(f"#     {line}" for line in self._plan(submission, gpus=self._previewed_gpus(submission)).splitlines()),
            "# variables:",
            *(f"#   {line}" for line in shown.splitlines()),
            "# job.yaml:",
            *(f"#   {line}" for line in submission.job.splitlines()),
        ]
        return "\n".join(lines) + "\n"

    def submit(self, submission: Submission) -> Record:
        client = self._client()
        gpus = self._placement(submission, self._known_nodes(client)).gpus
        deadline = submission.loaded.job.faults.deadline
        hint = f"wait for it, `stoker stop {submission.name}`, or give another --name"
        number = self._free_number(client, submission.name, hint)
        record = submission.record(
            "ray",
            target=self._block.model_dump(mode="json"),
            on=self._chosen.name,
            handle={"words": f"job {number}", "job": number, "deadline": deadline, "gpus": gpus},
        )
        staged = Path(tempfile.mkdtemp(prefix="stoker-ray-"))
        try:
            _stage(submission, staged)
            (staged / PLAN).write_text(self._plan(submission, gpus=gpus))
            (staged / FILE).write_text(record.to_json())
            runtime = self._runtime(str(staged), deadline)
            self._start(client, number, runtime, record)
            sent = answer_of(lambda: client.get_job_info(number)).runtime_env
        finally:
            shutil.rmtree(staged, ignore_errors=True)
        return replace(record, handle={**record.handle, "sent": sent["working_dir"]})

    def status(self, record: Record) -> Status:
        info = self._info(record)
        if info is None:
            return Status("lost", "Ray no longer knows the job")
        state = STATES[str(info.status)]
        message = " ".join((info.message or "").split())
        if state == "running":
            lines = self._log_lines(record)
            if not any(line.startswith("stoker | placed") for line in lines):
                waiting = [line.partition(" | ")[2] for line in lines if line.startswith("stoker | waiting")]
                return Status("waiting", waiting[-1] if waiting else "Ray places its nodes")
            message = ""
        if info.driver_exit_code is not None:
            message = f"ended with exit code {info.driver_exit_code}" if info.driver_exit_code else ""
        if state == "failed" and info.driver_exit_code in (SIGNAL_EXIT + signal.SIGTERM, -signal.SIGTERM):
            state = "stopped"
        return Status(state, message if state in ("failed", "stopped", "waiting") else "")  # type: ignore[arg-type]

    def logs(self, record: Record, *, rank: int | None, follow: bool) -> Iterator[str]:
        shown = 0
        while True:
            last = not follow or not self.status(record).is_active
            lines = self._log_lines(record, whole=last)
            yield from of_rank(lines[shown:], rank)
            shown = len(lines)
            if last:
                return
            time.sleep(POLL)

    def stop(self, record: Record) -> None:
        client, number = self._client(), record.value("job")
        answer_of(lambda: client.stop_job(number))
        until = time.monotonic() + record.value("deadline") + SECONDS_TO_END
        while self.status(record).is_active and time.monotonic() < until:
            time.sleep(POLL)

    def resume(self, record: Record) -> Record:
        client = self._client()
        number = self._free_number(client, record.name, "no action is needed")
        sent = record.handle.get("sent")
        if sent is None:  # the record is Ray's own, from before the files were sent
            info = self._info(record)
            sent = (info.runtime_env or {}).get("working_dir") if info is not None else None
        if not sent or not has_package(client.get_address(), sent):
            raise UserError(Problem(f"Ray no longer has what {record.name} needs", "submit the job again"))
        again = replace(record, time=time.time(), handle={**record.handle, "job": number, "words": f"job {number}"})
        self._start(client, number, self._runtime(sent, record.value("deadline")), again)
        return again

    def describe(self, record: Record) -> Iterator[str]:
        info = self._info(record)
        yield f"job          {record.value('job')} at {self._address()}"
        yield f"Ray says     {info.status if info is not None else 'nothing any more'}"
        yield f"files        {path_on_nodes(record.output, self._folder_of(record.name))}"
        for line in self._log_lines(record):
            if line.startswith("stoker | "):
                yield f"             {line.removeprefix('stoker | ')}"

    def _folder_of(self, name: str) -> str:
        """Returns the folder of a submission on the nodes, from which its relative paths are read."""
        return f"{self._block.folder.rstrip('/')}/{name}"

    def records(self) -> Sequence[Record]:
        return newest_of(record for _, record in self._jobs(self._client()))

    def _jobs(self, client: Any) -> Iterator[tuple[Any, Record]]:
        """Yields the jobs that Stoker submitted, each with its record."""
        for job in answer_of(client.list_jobs):
            text = (job.metadata or {}).get(METADATA)
            with suppress(ValueError):
                if text:
                    yield job, Record.from_json(text)

    def _free_number(self, client: Any, name: str, hint: str) -> str:
        """Returns the id of a run's next job. Ray accepts it from one of the commands that ask for it at once.

        Raises:
            UserError: a job of the run waits or runs.
        """
        last = 0
        for job, record in self._jobs(client):
            if record.name != name:
                continue
            state, number = STATES[str(job.status)], record.value("job")
            if state in ("waiting", "running"):
                raise UserError(Problem(f"{name} is already {state} as job {number}", hint))
            end = number.removeprefix(f"{name}-")
            last = max(last, int(end) if end.isdecimal() else 0)  # ids of earlier versions end with a time
        return f"{name}-{last + 1}"

    def _start(self, client: Any, number: str, runtime: dict[str, Any], record: Record) -> None:
        """Has Ray run the driver. A cluster that has just come up has no agent for jobs yet."""
        metadata = {METADATA: json.dumps(asdict(record))}
        until = time.monotonic() + SECONDS_TO_BEGIN
        while True:
            try:
                client.submit_job(entrypoint=self._entry, submission_id=number, runtime_env=runtime, metadata=metadata)
            except RuntimeError as error:
                if TAKEN in str(error):
                    message = f"another command is submitting or resuming {record.name} (as job {number})"
                    raise UserError(Problem(message, f"wait for it; then `stoker describe {record.name}`")) from error
                if NO_AGENT not in str(error) or time.monotonic() > until:
                    raise RunFailed(Problem(f"Ray: {' '.join(str(error).split())[:300]}")) from error
                time.sleep(POLL)
            except OSError as error:  # includes the exceptions of `requests`
                raise RunFailed(Problem(f"Ray: {' '.join(str(error).split())[:300]}")) from error
            else:
                return

    def _runtime(self, folder: str, deadline: float) -> dict[str, Any]:
        """Returns Ray's runtime environment: a local or an uploaded folder, and variables."""
        environment = {
            **self._variables(),
            "RAY_JOB_STOP_WAIT_TIME_S": str(int(deadline + SECONDS_TO_END)),  # SIGKILL comes after that
        }
        return {"working_dir": folder, "env_vars": environment}

    def _variables(self) -> dict[str, str]:
        """Returns the variables of the nodes, without forwarded secrets, which Ray's dashboard would show to anyone."""
        found = variables(self._block, os.environ)
        secrets = [name for name in found.keys() - self._block.environment.keys() if is_secret(name, found[name])]
        if secrets:
            names = " and ".join(sorted(secrets))
            print(f"not sent, because Ray shows variables to anyone: {names}; {SET_BY_RAY}", file=sys.stderr)
        return {name: value for name, value in found.items() if name not in secrets}

    def _no_secrets(self) -> None:
        """Raises where `environment` has secrets."""
        names = (name for name, value in self._block.environment.items() if is_secret(name, value))
        words = "could be read on Ray's dashboard"
        if found := [self._chosen.problem(f"environment.{n}", f"the value of {n} {words}", SET_BY_RAY) for n in names]:
            raise UserError(*found)

    @property
    def _entry(self) -> str:
        """The command that Ray runs as the job."""
        return f"{python_word(self._block.python)} -m stoker.cluster.ray.driver {PLAN}"

    def _address(self) -> str:
        written = "address" in self._block.model_fields_set
        return self._block.address if written else os.environ.get("RAY_API_SERVER_ADDRESS", self._block.address)

    def _client(self) -> Any:
        """Ray's client of jobs.

        Raises:
            UserError: Ray is not installed, or does not answer at the address.
        """
        try:
            from ray.exceptions import RayError
            from ray.job_submission import JobSubmissionClient
        except ImportError:
            problem = self._chosen.problem("", "Ray is not installed here", "pip install 'stoker[ray]'")
            raise UserError(problem) from None
        logging.getLogger("ray").setLevel(logging.WARNING)  # it logs every upload
        try:
            return JobSubmissionClient(with_scheme(self._address()))
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            reason = " ".join(str(error).split()).partition(". Please")[0]
            message = f"no Ray answers at {self._address()} ({reason[:200]})"
            hint = "`ray start --head` prints the dashboard's address"
            raise UserError(self._chosen.problem("address", message, hint)) from None

    def _known_nodes(self, client: Any) -> list[dict[str, Any]] | None:
        """Returns the cluster's nodes; raises UserError if `gpus: auto` depends on them and they are not reported."""
        nodes = nodes_at(client.get_address())
        if nodes is None and self._block.gpus == "auto":
            message = f"Ray at {self._address()} does not say which nodes it has, so `gpus: auto` cannot be decided"
            raise UserError(self._chosen.problem("gpus", message, "write `gpus: true`, or `gpus: false`"))
        return nodes

    def _placement(self, submission: Submission, nodes: Sequence[dict[str, Any]] | None) -> Placement:
        devices = submission.devices
        wants = self._block.gpus if self._block.gpus != "auto" else any(node.get("GPU") for node in nodes or ())
        return Placement(submission.nodes, self._block.cpus * devices, devices if wants else 0, self._block.resources)

    def _previewed_gpus(self, submission: Submission) -> int | Auto:
        """Returns the GPUs that `submit` would request for each node; ``auto`` if the cluster cannot be asked."""
        nodes: list[dict[str, Any]] | None = None
        if self._block.gpus != "auto":
            nodes = []  # they do not matter
        elif find_spec("requests") is not None:  # which Ray brings
            nodes = nodes_at(self._address().rstrip("/"), timeout=SECONDS_TO_ANSWER)
        return "auto" if nodes is None else self._placement(submission, nodes).gpus

    def _plan(self, submission: Submission, *, gpus: int | Auto) -> str:
        """Returns the driver's file."""
        placement = {**asdict(self._placement(submission, None)), "gpus": gpus}
        output, to = path_on_nodes(submission.output, "FOLDER"), submission.loaded.job.checkpoint.to
        moved = [f"checkpoint.to={path_on_nodes(to, 'FOLDER')}"] if to is not None and not submission.stages else []
        words = [JOB, f"output={output}", *moved, "--secret", "SECRET", "--nodes", submission.nodes_option]
        values = {
            "name": submission.name,
            "placement": placement,
            "words": [*words, "--devices", str(submission.devices)],
            "folder": self._folder_of(submission.name),
            "output": output,
            "wait": self._block.wait,
        }
        return json.dumps(values, indent=2) + "\n"

    def _info(self, record: Record) -> Any:
        client = self._client()
        try:
            return client.get_job_info(record.value("job"))
        except RuntimeError as error:
            if "404" in str(error) or "does not exist" in str(error):
                return None
            raise RunFailed(Problem(f"Ray: {' '.join(str(error).split())[:300]}")) from error

    def _log_lines(self, record: Record, *, whole: bool = True) -> list[str]:
        """Returns the lines of the driver's log.

        Args:
            whole: whether the last line has ended; else one without its end is left for later.
        """
        client = self._client()
        text: str = answer_of(lambda: client.get_job_logs(record.value("job")))
        lines = text.split("\n")
        return lines[:-1] if not lines[-1] or not whole else lines


def _stage(submission: Submission, folder: Path) -> None:
    """Lays the files out as on the nodes, with the package `stoker` beside the job."""
    for file in submission.files:
        place = folder / file.path
        if place.name in LEFT_OUT_BY_RAY:  # Ray would leave out the files that they list
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        if file.source is not None:
            shutil.copyfile(file.source, place)
        else:
            place.write_bytes(file.read())
    archive = folder / ARCHIVE
    if archive.exists():
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        archive.unlink()
