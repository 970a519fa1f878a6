"""``target: {ssh: ...}``: hosts of a list or a host file, one supervisor on each, started and ended by ssh."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from stoker.cluster.chosen_target import ChosenTarget
from stoker.cluster.claim import claimed_on_all
from stoker.cluster.environment import ENVIRONMENT, environment_text, variables
from stoker.cluster.log_files import LogPlace, read_logs, run_logs
from stoker.cluster.python_check import python_problem, requirements_of
from stoker.cluster.record import FILE, Record, newest_of, save_undoably
from stoker.cluster.records_there import private_contents, records_in, send_private
from stoker.cluster.send import link_script, missing_script, send
from stoker.cluster.shell import ShellFailed, on_all, quoted
from stoker.cluster.ssh.block_hosts import hosts_of_block, key_of_host
from stoker.cluster.ssh.connection import Connection, SshSettings
from stoker.cluster.ssh.folder_probe import hosts_without
from stoker.cluster.ssh.host_addresses import with_address
from stoker.cluster.ssh.host_file import Host
from stoker.cluster.ssh.host_states import is_unknown, may_return, status_of
from stoker.cluster.ssh.options import option_problems
from stoker.cluster.ssh.recorded_hosts import hosts_of_record
from stoker.cluster.ssh.start_script import START, launch_line, start_script
from stoker.cluster.ssh.supervisors import Supervisors
from stoker.cluster.submission import SECRET, SentFile, Submission
from stoker.cluster.target import Status
from stoker.errors import CannotRun, Problem, RunFailed, UserError
from stoker.job.targets.ssh import SshBlock
from stoker.launch.nodes.shared_storage import shared_storage_hint

SECONDS_TO_ANSWER = 5.0  # beyond those in which a connection is made
SECONDS_TO_END = 90.0  # beyond the job's own deadline, until the process groups are killed


def open_target(chosen: ChosenTarget) -> SshTarget:
    """Returns the target of a block; its host file is read.

    Raises:
        UserError: the hosts are not named, or wrongly.
    """
    assert isinstance(chosen.block, SshBlock)
    if problems := option_problems(chosen, chosen.block):
        raise UserError(*problems)
    return SshTarget(chosen, chosen.block)


class SshTarget:
    """Hosts with OpenSSH; see `stoker.cluster.target.Target`."""

    def __init__(self, chosen: ChosenTarget, block: SshBlock) -> None:
        self._chosen, self._block = chosen, block
        self._hosts = hosts_of_block(chosen, block)
        self._settings = SshSettings(
            identity=block.identity or "",
            jump=block.jump or "",
            config=block.config or "",
            options=block.options,
            connect=block.connect,
        )
        self._connections: dict[str, Connection] = {}
        self._supervisors = Supervisors(self._connection, self._home, block.connect + SECONDS_TO_ANSWER)

    def host_count(self) -> int | None:
        return len(self._hosts) - self._block.spares

    def check(self, submission: Submission) -> None:
        self._counted(submission)
        self._files_exist()
        if shutil.which("ssh") is None:
            raise UserError(self._chosen.problem("", "ssh is not installed", "install OpenSSH's client"))
        needed = requirements_of(submission)
        found = on_all(self._taken(submission), lambda host: self._problem(host, needed))
        if problems := [problem for problem in found if problem is not None]:
            raise UserError(*problems)
        self._folder_is_shared(submission)

    def preview(self, submission: Submission) -> str:
        self._counted(submission)
        self._files_exist()
        hosts = [host if host.address else replace(host, address=host.name) for host in self._taken(submission)]
        script = start_script(submission, self._block, self._rendezvous(hosts, submission))
        shown = environment_text(variables(self._block, os.environ), hidden=True)
        spares = f"; the last {submission.spares} wait as spares" if submission.spares else ""
        lines = [
            f"# {submission.label} to {len(hosts)} host{'s' * (len(hosts) > 1)}, {submission.devices} on each{spares}",
            f"# sent to {self._block.folder}/.store unless it is there, and linked into {self._home(submission.name)}:",
            *(f"#   {file.summary}" for file in submission.files),
            *(f"# written there with mode 600: {file.path}" for file in submission.private),
            f"# written there with mode 600: {SECRET} (32 random bytes), {ENVIRONMENT}:",
            *(f"#   {line}" for line in shown.splitlines()),
            "# for hosts without `address`, the address detected on the host is used",
            "# scripts with little input run one after another in one `sh` on each host",
        ]
        for index, host in enumerate(hosts):
            ssh = self._connection(host)
            words = [ssh.words(missing_script(self._block.folder)), ssh.words(self._link(submission.name))]
            words.append(ssh.words(self._launch(submission.name, host, spare=index >= submission.nodes)))
            lines += ["", f"# {host.name}", *(shlex.join(command) for command in words)]
        lines += ["", f"# {START}", *_commented(script), "", "# job.yaml", *_commented(submission.job)]
        return "\n".join(lines) + "\n"

    def submit(self, submission: Submission) -> Record:
        name, taken = submission.name, self._taken(submission)
        with claimed_on_all([*map(self._connection, taken)], self._home(name), name):
            running = [host.name for host, state in self._supervisors.states(name, taken).items() if state == "running"]
            if running:
                message = f"{name} is already running on {', '.join(running)}"
                raise UserError(Problem(message, f"wait for it, `stoker stop {name}`, or give another --name"))
            hosts, record = self._send(submission)
            self._start(record, hosts, again=False, undo=save_undoably(record))
        return record

    def _send(self, submission: Submission) -> tuple[list[Host], Record]:
        """Sends the files; returns the hosts with their addresses, and the record."""
        block, name = self._block, submission.name
        connections = [self._connection(host) for host in self._taken(submission)]
        alone = len(connections) == 1
        hosts = on_all(
            list(zip(self._taken(submission), connections, strict=True)),
            lambda pair: with_address(*pair, interface=block.interface, alone=alone),
        )
        script = start_script(submission, block, self._rendezvous(hosts, submission))
        files = [*submission.files, SentFile.made(START, script)]
        places = connections[:1] if block.shared else connections
        record = self._record(submission, hosts)
        private = {**private_contents(submission, block), FILE: record.to_json().encode()}

        def place(connection: Connection) -> int:
            sent = send(connection, files, block.folder, name)
            send_private(connection, self._home(name), private)
            return sent

        sent = sum(on_all(places, place))
        return hosts, replace(record, handle={**record.handle, "bytes_sent": sent})

    def status(self, record: Record) -> Status:
        states = self._supervisors.states(record.name, hosts_of_record(record))
        return status_of({host.name: state for host, state in states.items()}, record.value("requeue"))

    def logs(self, record: Record, *, rank: int | None, follow: bool) -> Iterator[str]:
        home, folder = self._home(record.name), self._output(record.name, record.output)
        places = []
        for host in hosts_of_record(record):
            connection = self._connection(host)
            if rank is None:
                log = f"{home}/logs/{shlex.quote(host.name)}.log"
                places.append(LogPlace(connection, log, lambda path: path.rpartition("/")[2].removesuffix(".log")))
            places += run_logs(connection, folder)
        yield from read_logs(places, rank=rank, follow=follow, ended=lambda: not self.status(record).is_active)

    def stop(self, record: Record) -> None:
        states = self._supervisors.states(record.name, hosts_of_record(record))
        silent = {host.name: state for host, state in states.items() if is_unknown(state)}
        asked = [host for host in states if host.name not in silent]
        silent |= self._supervisors.stop(record.name, asked, record.value("deadline") + SECONDS_TO_END)
        if not silent:
            return
        stopped = [host.name for host in asked if host.name not in silent and states[host] == "running"]
        what = f"is stopped on {', '.join(stopped)}" if stopped else "runs on none of the hosts that answer"
        away = "; ".join(f"{name}: {why}" for name, why in silent.items())
        raise RunFailed(
            Problem(
                f"{record.name} {what}, and may be running on {', '.join(silent)} ({away})",
                f"`stoker stop {record.name}` again once {'it answers' if len(silent) == 1 else 'they answer'}",
            )
        )

    def resume(self, record: Record) -> Record:
        hosts = hosts_of_record(record)
        states = self._supervisors.states(record.name, hosts)
        answering = [self._connection(host) for host, state in states.items() if not is_unknown(state)]
        if not answering:
            raise RunFailed(*(f"{host.name}: {state}" for host, state in states.items()))
        with claimed_on_all(answering, self._home(record.name), record.name):
            return self._resumed(record, self._supervisors.states(record.name, hosts))

    def _resumed(self, record: Record, states: dict[Host, str]) -> Record:
        hosts = [*states]
        running = [host.name for host, state in states.items() if state == "running"]
        handle = {key: value for key, value in record.handle.items() if key != "started"}
        if running:  # the run's group takes the others in
            hosts = [host for host, state in states.items() if may_return(state)]
            away = [f"{host.name}: {state}" for host, state in states.items() if is_unknown(state)]
            still = f"{record.name} is running on {', '.join(running)}"
            if not hosts:
                hint = "try again once it answers" if away else "no action is needed"
                raise UserError(Problem("; ".join([still, *away]), hint))
            handle["started"] = "; ".join([", ".join(host.name for host in hosts), still, *away])
        self._start(record, hosts, again=True, undo=lambda: None)
        return replace(record, time=time.time(), handle=handle)

    def describe(self, record: Record) -> Iterator[str]:
        folder = f"{self._block.folder}/{record.name}"
        states = self._supervisors.states(record.name, hosts_of_record(record))
        rows = [
            (host.name, host.address, state, f"{self._connection(host).destination}:{folder}")
            for host, state in states.items()
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()

    def records(self) -> Sequence[Record]:
        found = on_all(self._hosts, self._records_on)
        lists = [each for each in found if not isinstance(each, ShellFailed)]
        if not lists:
            raise next(each for each in found if isinstance(each, ShellFailed))
        return newest_of(itertools.chain(*lists))

    def _records_on(self, host: Host) -> list[Record] | ShellFailed:
        try:
            return records_in(self._connection(host), self._block.folder)
        except ShellFailed as error:
            return error

    def _counted(self, submission: Submission) -> None:
        """Raises where a host has fewer slots than the node has processes."""
        problems = []
        for host in self._taken(submission):
            if host.slots is not None and len(host.slots) < submission.devices:
                message = f"{host.name} has {len(host.slots)} slots, but each host runs {submission.devices} processes"
                key = key_of_host(self._block, host)
                problems.append(self._chosen.problem(key, message, "lower `parallel`, or write `devices`"))
        if problems:
            raise CannotRun(*problems)

    def _folder_is_shared(self, submission: Submission) -> None:
        """Raises where a host does not see the run's folder of the first host, and the run would end for it."""
        shells, output = [self._connection(host) for host in self._taken(submission)], submission.output
        below = not output.startswith("/")
        if len(shells) == 1 or (below and self._block.shared) or not submission.needs_shared_storage:
            return
        loaded, shown = submission.loaded, f"{self._block.folder}/{submission.name}/{output}" if below else output
        try:
            without = hosts_without(self._output(submission.name, output), shells)
        except ShellFailed as error:
            message = f"the run's folder {shown} cannot be checked: {error}"
            raise UserError(loaded.problem("output", message, "give a folder that can be written there")) from None
        if without:
            message = f"the run's folder {shown} of {shells[0].name} is not seen on {', '.join(without)}"
            raise UserError(
                loaded.problem("output", message, shared_storage_hint(loaded.job, several=bool(submission.stages)))
            )

    def _files_exist(self) -> None:
        for key in ("identity", "config"):
            value = getattr(self._block, key)
            if value and not Path(value).expanduser().is_file():
                raise UserError(self._chosen.problem(key, f"there is no file {value}", "name the file"))

    def _taken(self, submission: Submission) -> list[Host]:
        return self._hosts[: submission.hosts]

    def _connection(self, host: Host) -> Connection:
        block = self._block
        new = Connection(host.name, self._settings, host.user or block.user or "", host.port or block.ssh_port)
        return self._connections.setdefault(host.name, new)

    def _start(self, record: Record, hosts: Sequence[Host], *, again: bool, undo: Callable[[], None]) -> None:
        """Starts the supervisors; see `Supervisors.start`."""
        spares = {host.name for host in hosts_of_record(record)[record.nodes :]}
        lines = {host: self._launch(record.name, host, spare=host.name in spares, again=again) for host in hosts}
        self._supervisors.start(record.name, lines, undo)

    def _home(self, name: str) -> str:
        return f"{quoted(self._block.folder)}/{shlex.quote(name)}"

    def _output(self, name: str, output: str) -> str:
        """Returns the run's folder, in shell syntax."""
        return shlex.quote(output) if output.startswith("/") else f"{self._home(name)}/{shlex.quote(output)}"

    def _link(self, name: str) -> str:
        return link_script(self._block.folder, name)

    def _launch(self, name: str, host: Host, *, spare: bool = False, again: bool = False) -> str:
        slots = ",".join(map(str, host.slots)) if host.chosen and host.slots else ""
        return launch_line(self._home(name), host.name, host.address, slots, spare=spare, again=again)

    def _rendezvous(self, hosts: Sequence[Host], submission: Submission) -> list[str]:
        return [f"{host.address}:{submission.port}" for host in hosts]

    def _problem(self, host: Host, needed: Sequence[str]) -> Problem | None:
        """Returns why a host cannot be used: ssh's own reason, or no suitable Python; None if it can."""
        try:
            found = python_problem(self._connection(host), self._block, needed, self._block.connect)
        except ShellFailed as error:
            return self._chosen.problem(
                key_of_host(self._block, host), str(error), f"`ssh {self._connection(host).destination}` must work"
            )
        return self._chosen.problem("python", f"{host.name}: {found.message}", found.hint) if found else None

    def _from_anywhere(self, hosts: Sequence[Host]) -> SshBlock:
        """Returns the block as any folder understands it: the hosts that were chosen, absolute paths."""
        paths = {
            key: str(Path.cwd() / Path(value).expanduser())
            for key in ("identity", "config")
            if (value := getattr(self._block, key)) is not None
        }
        chosen = {
            "hosts": [f"[{host.name}]" if ":" in host.name else host.name for host in hosts],  # as lines of a host file
            "hostfile": None,
            "include": None,
            "exclude": None,
        }
        return self._block.model_copy(update={**chosen, **paths})

    def _record(self, submission: Submission, hosts: Sequence[Host]) -> Record:
        names = ", ".join(host.name for host in hosts)
        return submission.record(
            "ssh",
            target=self._from_anywhere(hosts).model_dump(mode="json"),
            on=self._chosen.name,
            handle={
                "words": names,
                "hosts": [asdict(host) for host in hosts],
                "deadline": submission.loaded.job.faults.deadline,
                "requeue": submission.loaded.job.faults.requeue,
            },
        )


def _commented(text: str) -> list[str]:
    return [f"#   {line}".rstrip() for line in text.splitlines()]
