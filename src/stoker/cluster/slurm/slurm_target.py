"""``target: {slurm: ...}``: sbatch, squeue and scancel, here or on a login node."""

from __future__ import annotations

import difflib
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from stoker.cluster.chosen_target import ChosenTarget
from stoker.cluster.claim import claimed
from stoker.cluster.environment import ENVIRONMENT, environment_text, variables
from stoker.cluster.log_files import LogPlace, read_logs, run_logs
from stoker.cluster.python_check import PythonProblem, python_problem, requirements_of
from stoker.cluster.record import FILE, Record, all_records, save_undoably
from stoker.cluster.records_there import private_contents, records_in, send_private, write_private
from stoker.cluster.send import send
from stoker.cluster.shell import LocalShell, Shell, ShellFailed, quoted
from stoker.cluster.slurm.batch_script import CANCELLED, ENDED, NUMBER, SCRIPT, STOP, TIME, batch_script
from stoker.cluster.slurm.block_problems import block_problems, gpus_of
from stoker.cluster.slurm.job_state import JobState, job_state
from stoker.cluster.ssh.connection import Connection, SshSettings
from stoker.cluster.ssh.host_file import parse_host
from stoker.cluster.ssh.options import ssh_option_problems
from stoker.cluster.submission import SECRET, SentFile, Submission
from stoker.cluster.target import Status
from stoker.errors import CannotRun, Problem, RunFailed, UserError
from stoker.job.targets.slurm import SlurmBlock
from stoker.resilience.stop_signals import deferred_stops, end_by

POLL = 1.0  # seconds between two looks while a job ends
SECONDS_TO_ANSWER = 15.0  # beyond those in which a Python starts
SECONDS_TO_END = 60.0  # beyond the job's own deadline, until it is cancelled
UNSCHEDULABLE = ("node configuration is not available", "Node count specification invalid", "nodes are busy")


def open_target(chosen: ChosenTarget) -> SlurmTarget:
    """Returns the target of a block.

    Raises:
        UserError: keys of the block exclude each other.
    """
    assert isinstance(chosen.block, SlurmBlock)
    block = chosen.block
    problems = [chosen.problem(*found) for found in block_problems(block)]
    if block.login is not None:
        problems += ssh_option_problems(chosen, "ssh", block.ssh)
    if problems:
        raise UserError(*problems)
    return SlurmTarget(chosen, block)


class SlurmTarget:
    """A cluster with Slurm; see `stoker.cluster.target.Target`."""

    def __init__(self, chosen: ChosenTarget, block: SlurmBlock) -> None:
        self._chosen, self._block = chosen, block
        self._shell: Shell = LocalShell()
        if block.login is not None:
            host = parse_host(block.login, partial(chosen.problem, "login"))
            if host.slots is not None or host.address:
                message = f"`{block.login}` is a login node, which needs no slots and no address"
                hint = "write, for example, me@login.example.org, or me@login.example.org port=2222"
                raise UserError(chosen.problem("login", message, hint))
            settings = SshSettings(options=block.ssh)
            self._shell = Connection(host.name, settings, host.user, host.port)

    def host_count(self) -> int | None:
        return None

    def check(self, submission: Submission) -> None:
        self._enough_devices(submission)
        try:
            there = self._shell.run(
                "for c in sbatch squeue scancel scontrol sinfo; do command -v $c >/dev/null || echo $c; done"
            )
        except ShellFailed as error:
            if self._block.login is None:
                raise
            raise UserError(self._chosen.problem("login", str(error), f"`ssh {self._block.login}` must work")) from None
        if missing := there.decode().split():
            where = f"on {self._block.login}" if self._block.login else "here"
            hint = "write another `login`" if self._block.login else "write `login: me@host`, or submit on a login node"
            message = f"there is no {' and no '.join(missing)} {where}"
            raise UserError(self._chosen.problem("login", message, hint))
        self._check_controller()
        try:
            self._shell.run(
                f"cd {self._from} && sbatch --test-only", given=self._script(submission).encode(), timeout=60
            )
        except ShellFailed as error:
            reason = (
                error.stderr.splitlines()[-1].removeprefix("sbatch: ").removeprefix("error: ") if error.stderr else ""
            )
            reason = reason.removeprefix("allocation failure: ")
            kind = CannotRun if any(words in reason for words in UNSCHEDULABLE) else UserError
            raise kind(self._chosen.problem(_key_of(reason), f"Slurm refuses the job: {reason}", "")) from None
        self._check_python(submission)

    def preview(self, submission: Submission) -> str:
        self._enough_devices(submission)
        shown = environment_text(variables(self._block, os.environ), hidden=True)
        where = f"{self._block.login}:" if self._block.login else ""
        notes = [
            f"sent to {where}{self._files(submission.name)}, beside this script ({SCRIPT}):",
            *(f"  {file.summary}" for file in self._sent(submission)),
            *(f"  {file.path}  mode 600" for file in submission.private),
            f"  {SECRET}  32 random bytes, mode 600",
            f"  {ENVIRONMENT}, mode 600:",
            *(f"    {line}" for line in shown.splitlines()),
            *(f"used where it is: {file.path}  {file.digest[:16]}" for file in submission.files if file.in_place),
            "job.yaml:",
            *(f"  {line}" for line in submission.job.splitlines()),
        ]
        return self._script(submission) + "\n" + "".join(f"# {note}".rstrip() + "\n" for note in notes)

    def submit(self, submission: Submission) -> Record:
        name, shell, home = submission.name, self._shell, self._home(submission.name)
        with claimed(shell, home, name):
            there = self._newest(name, home)
            if there is not None and (status := self.status(there)).is_active:
                message = f"{name} is already {status.state} as job {there.value('job')}"
                raise UserError(Problem(message, f"wait for it, `stoker stop {name}`, or give another --name"))
            files = [*self._sent(submission), SentFile.made(SCRIPT, self._script(submission))]
            sent = send(shell, files, self._folder, name)
            send_private(shell, home, private_contents(submission, self._block))
            handle = {
                "folder": self._folder,
                "deadline": submission.loaded.job.faults.deadline,
                "requeue": submission.loaded.job.faults.requeue,
                "bytes_sent": sent,
            }
            target = self._block.model_dump(mode="json")
            record = submission.record("slurm", target=target, on=self._chosen.name, handle=handle)
            return self._submitted(record, home, home if self._block.login else self._from)

    def status(self, record: Record) -> Status:
        code, _, ended_by = self._ending(record).partition(" ")
        if ended_by == TIME:
            again = f"`stoker resume {record.name}` continues it"
            ended_by = f"its time limit ended it, and `requeue` allows no further start; {again}"
        return self._state(record).status(int(code) if code.isdecimal() else None, record.value("requeue"), ended_by)

    def logs(self, record: Record, *, rank: int | None, follow: bool) -> Iterator[str]:
        home = self._home_of(record)
        from_home = _by_login(record) and not record.output.startswith("/")
        output = shlex.quote(record.output if from_home else str(Path(record.base) / record.output))
        places = run_logs(self._shell, f"{home}/{output}" if from_home else output)
        if rank is None:
            places.insert(0, LogPlace(self._shell, f"{home}/logs/slurm-*.log", lambda path: "slurm"))
        yield from read_logs(places, rank=rank, follow=follow, ended=lambda: not self.status(record).is_active)

    def stop(self, record: Record) -> None:
        record = self._numbered(record)
        if not record.value("job"):
            message = f"sbatch has given no number for {record.name}, whose submission was interrupted"
            raise RunFailed(Problem(message, f"`squeue --name={record.name}` shows whether it is queued"))
        job, shell = shlex.quote(record.value("job")), self._shell
        status = self.status(record)
        shell.run(f": > {self._home_of(record)}/{STOP}")
        if status.state == "waiting":
            self._cancel(record)
            return
        if status.state != "running":
            return
        shell.run(f"scancel --batch --signal=TERM {job}")
        until = time.monotonic() + record.value("deadline") + SECONDS_TO_END
        while time.monotonic() < until:
            if not self.status(record).is_active:
                return
            time.sleep(POLL)
        self._cancel(record)

    def _cancel(self, record: Record) -> None:
        """Cancels the job, and notes it, for when Slurm no longer knows the job."""
        ended = f"{self._home_of(record)}/{ENDED}"
        note = f"[ -e {ended} ] || echo '{CANCELLED}' > {ended}"
        self._shell.run(f"scancel {shlex.quote(record.value('job'))} && {{ {note}; }}")

    def resume(self, record: Record) -> Record:
        home = self._home_of(record)
        with claimed(self._shell, home, record.name):
            record = self._newest(record.name, home) or self._numbered(record)  # another command may have resumed it
            status = self.status(record)
            if status.is_active:
                message = f"{record.name} is {status.state} as job {record.value('job')}"
                raise UserError(Problem(message, "no action is needed"))
            where = home if _by_login(record) else shlex.quote(record.base)
            return self._submitted(replace(record, time=time.time()), home, where)

    def describe(self, record: Record) -> Iterator[str]:
        record = self._numbered(record)
        found = self._state(record)
        yield f"job          {record.value('job')}" + (f" at {self._block.login}" if self._block.login else "")
        yield f"Slurm says   {found.state or 'nothing any more'}" + (f" ({found.reason})" if found.reason else "")
        yield f"nodes        {found.nodes or '-'}"
        yield f"restarts     {found.restarts}"
        yield f"files        {record.value('folder')}/{record.name}"
        try:
            start = self._shell.run(
                f"squeue --noheader --jobs={shlex.quote(record.value('job'))} --format=%S"  # `--start` ignores it
            )
        except ShellFailed:
            return
        if found.state == "PENDING" and (expected := start.decode().strip()) not in ("", "N/A"):
            yield f"may start    {expected}"

    def records(self) -> Sequence[Record]:
        folders = [self._folder]
        if self._block.login is None:  # the folder may be relative, and this user may have submitted from others
            here = (record for record in all_records() if record.kind == "slurm" and not _by_login(record))
            folders += [record.handle["folder"] for record in here if "folder" in record.handle]
        found: dict[str, Record] = {}
        for folder in dict.fromkeys(folders):
            for record in records_in(self._shell, folder):
                found.setdefault(record.name, record)
        return list(found.values())

    @property
    def _folder(self) -> str:
        """The folder of all submissions; without a login node as an absolute path."""
        return self._block.folder if self._block.login else str(Path.cwd() / Path(self._block.folder).expanduser())

    @property
    def _from(self) -> str:
        """The folder in which sbatch is called, in shell syntax."""
        return '"$HOME"' if self._block.login else shlex.quote(str(Path.cwd()))

    def _home(self, name: str) -> str:
        return f"{quoted(self._folder)}/{shlex.quote(name)}"

    def _home_of(self, record: Record) -> str:
        return f"{quoted(record.value('folder'))}/{shlex.quote(record.name)}"

    def _files(self, name: str) -> str:
        """Returns the submission's folder, from where sbatch is called."""
        return "." if self._block.login else str(Path(self._block.folder).expanduser() / name)

    def _script(self, submission: Submission) -> str:
        return batch_script(submission, self._block, files=self._files(submission.name))

    def _sent(self, submission: Submission) -> list[SentFile]:
        return [file for file in submission.files if not file.in_place]

    def _submitted(self, record: Record, home: str, where: str) -> Record:
        """Submits the script by sbatch; returns the record with the job's number, which is saved here and there.

        A stop signal that comes meanwhile cancels the job. A second one leaves a record without the number, which
        sbatch still writes beside it.

        Args:
            home: the submission's folder, as the shell reads it.
            where: the folder in which the job works, likewise.
        """
        shell, name = self._shell, record.name
        words = f"interrupted: {name} is being submitted, and will be cancelled (Ctrl-C again may leave it queued)"
        call = f"sbatch --parsable {home}/{SCRIPT} >{home}/{NUMBER} && cat {home}/{NUMBER}"
        with deferred_stops(words) as signals:
            try:
                out = shell.run(f"cd {home} && rm -f {STOP} {ENDED} {NUMBER} && cd {where} && {call}")
            except ShellFailed as error:
                raise RunFailed(Problem(f"sbatch: {error.stderr.removeprefix('sbatch: ')}")) from None
            except (KeyboardInterrupt, SystemExit):
                self._saved(_with_number(record, ""), home)
                print(f"{name} may be queued: `stoker stop {name}` cancels it", file=sys.stderr)
                raise
            again = _with_number(record, out.decode())
            undo = self._saved(again, home)
            if not signals:
                return again
            shell.run(f"scancel {shlex.quote(again.value('job'))}")
            undo()
        print(f"job {again.value('job')} of {name} is cancelled", file=sys.stderr)
        end_by(signals[0])

    def _saved(self, record: Record, home: str) -> Callable[[], None]:
        """Saves a record here and there; returns a function that restores the earlier one here."""
        undo = save_undoably(record)
        write_private(self._shell, f"{home}/{FILE}", record.to_json().encode())
        return undo

    def _newest(self, name: str, home: str) -> Record | None:
        """Returns the record that is stored in a submission's folder; None if it has none of a Slurm job."""
        text = self._shell.run(f"cat {home}/{FILE} 2>/dev/null || :")
        with suppress(ValueError):
            record = Record.from_json(text)
            return self._numbered(record) if record.kind == "slurm" else None
        return None

    def _numbered(self, record: Record) -> Record:
        """Returns the record with its job's number, which one of an interrupted submission lacks."""
        if record.value("job"):
            return record
        return _with_number(record, self._shell.run(f"cat {self._home_of(record)}/{NUMBER} 2>/dev/null || :").decode())

    def _state(self, record: Record) -> JobState:
        job = self._numbered(record).value("job")
        return job_state(self._shell, job) if job else JobState("")

    def _ending(self, record: Record) -> str:
        """Returns what the job's script has left of its end; empty if it has not ended."""
        return self._shell.run(f"cat {self._home_of(record)}/{ENDED} 2>/dev/null || :").decode().strip()

    def _enough_devices(self, submission: Submission) -> None:
        """Raises where `gres` has fewer GPUs than a node has processes."""
        count = gpus_of(self._block.gres)
        if count is not None and count < submission.devices:
            message = f"`gres: {self._block.gres}` has {count} GPUs, and each node runs {submission.devices} processes"
            hint = f"write `gres: gpu:{submission.devices}`, or `devices: {count}`"
            raise UserError(self._chosen.problem("gres", message, hint))

    def _check_python(self, submission: Submission) -> None:
        """Raises where the nodes' Python is a path that is seen from where sbatch runs, and is not suitable.

        Others may be on the nodes only, or come from `setup`, which is for the nodes and is not run here: a note then
        says what is not certain.
        """
        block, where = self._block, self._shell.name
        if block.container != "none":
            return
        if block.setup:
            why = "`setup` runs on the nodes only"
        else:
            try:
                found = python_problem(self._shell, block, requirements_of(submission), SECONDS_TO_ANSWER)
            except ShellFailed as error:
                found = PythonProblem(error.stderr, is_absent=True)
            if found is None:
                return
            if "/" in block.python and not found.is_absent:
                raise UserError(self._chosen.problem("python", f"{where}: {found.message}", found.hint))
            why = f"on {where}, {found.message}"
        print(f"Python is not checked: {why}; the nodes need one with Stoker's dependencies", file=sys.stderr)

    def _check_controller(self) -> None:
        """Raises where Slurm's controller does not answer, or has no such partition."""
        try:
            known = self._shell.run("sinfo --noheader --format=%R", timeout=60).decode().split()
        except ShellFailed as error:
            reason = next(iter(error.stderr.splitlines()), f"sinfo ended with exit code {error.code}")
            hint = "`scontrol ping` says whether slurmctld runs; check it, or write another `login`"
            raise UserError(self._chosen.problem("login", f"Slurm does not answer: {reason}", hint)) from None
        if self._block.partition is None:
            return
        for name in self._block.partition.split(","):
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"write {near[0]}" if near else f"the partitions are {', '.join(sorted(set(known)))}"
                raise UserError(self._chosen.problem("partition", f"there is no partition {name}", hint))


def _with_number(record: Record, out: str) -> Record:
    """Returns the record with the job's number from the output of ``sbatch --parsable``; empty if that is not known."""
    number = out.strip().partition(";")[0]
    return replace(record, handle={**record.handle, "job": number, "words": f"job {number}".rstrip()})


def _by_login(record: Record) -> bool:
    """Returns whether a run was submitted through a login node, and so works in the submission's folder.

    Its record has the answer: with ``--on``, it may have been submitted through a target of other keys.
    """
    return bool(record.target.get("login"))


def _key_of(reason: str) -> str:
    """Returns the key that an error of sbatch concerns; empty if it is unknown."""
    words = {"account": "account", "partition": "partition", "qos": "qos", "QOS": "qos", "feature": "constraint"}
    words |= {"time limit": "time", "generic resource": "gres", "reservation": "reservation", "Node count": "nodes"}
    words |= {"node configuration": "nodes"}
    return next((key for word, key in words.items() if word in reason), "")
