"""The supervisors of a run on its hosts: their states, and how they are started and ended."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from stoker.cluster.shell import NO_ANSWER, ShellFailed, on_all
from stoker.cluster.ssh.connection import UNREACHED, Connection
from stoker.cluster.ssh.host_file import Host
from stoker.cluster.ssh.start_script import state_script, stop_script
from stoker.errors import Problem, RunFailed
from stoker.resilience.stop_signals import deferred_stops, end_by

AGAIN = 60.0  # seconds in which a host that did not answer is not asked again
SECONDS_AFTER = 60.0  # in which a host answers once its supervisor has ended


class Supervisors:
    """The supervisors of runs.

    Args:
        connection: of a host.
        home: the folder of a run, in shell syntax.
        seconds: in which a host must give a state.
    """

    def __init__(self, connection: Callable[[Host], Connection], home: Callable[[str], str], seconds: float) -> None:
        self._connection, self._home, self._seconds = connection, home, seconds
        self._silent: dict[str, tuple[float, str]] = {}  # when a host did not answer, and why

    def states(self, name: str, hosts: Sequence[Host]) -> dict[Host, str]:
        """Returns for each host ``running``, ``ended CODE``, ``gone``, or why it cannot be asked."""
        return dict(zip(hosts, on_all(hosts, lambda host: self.state(name, host)), strict=True))

    def state(self, name: str, host: Host) -> str:
        """Returns the state of one host. One that did not answer is not asked again for `AGAIN` seconds."""
        since, reason = self._silent.get(host.name, (-math.inf, ""))
        if time.monotonic() - since < AGAIN:
            return reason
        script = state_script(self._home(name), host.name)
        try:
            return self._connection(host).run(script, timeout=self._seconds).decode().strip()
        except ShellFailed as error:
            if error.code in (UNREACHED, NO_ANSWER):
                self._silent[host.name] = time.monotonic(), error.stderr
            return error.stderr

    def stop(self, name: str, hosts: Sequence[Host], seconds: float) -> dict[str, str]:
        """Ends supervisors; those that have not saved and ended after ``seconds`` are killed.

        Returns:
            The hosts that did not answer, by name, each with the reason.
        """

        def end(host: Host) -> str:
            script = stop_script(self._home(name), host.name, seconds)
            try:
                self._connection(host).run(script, timeout=seconds + SECONDS_AFTER)
            except ShellFailed as error:
                return error.stderr or str(error)
            return ""

        return {host.name: why for host, why in zip(hosts, on_all(hosts, end), strict=True) if why}

    def start(self, name: str, lines: Mapping[Host, str], undo: Callable[[], None]) -> None:
        """Starts supervisors. Where one cannot be started, or a stop signal comes, those of all hosts are ended.

        Args:
            lines: the command of each host.
            undo: called where none of them is left.

        Raises:
            RunFailed: one cannot be started.
            KeyboardInterrupt, SystemExit: a stop signal came.
        """
        problems: list[Problem] = []
        words = f"interrupted: {name} is being started, and will be ended (Ctrl-C again leaves it running)"
        try:
            with deferred_stops(words) as signals:
                try:
                    on_all([*lines], lambda host: self._connection(host).run(lines[host]))
                except RunFailed as error:
                    problems += error.problems
                if not problems and not signals:
                    return
                if silent := self.stop(name, [*lines], 0):
                    message = f"{name} may be running on {', '.join(silent)}"
                    problems.append(Problem(message, f"`stoker stop {name}` ends it"))
                else:
                    undo()
        except (KeyboardInterrupt, SystemExit):
            print(f"{name} may be running: `stoker stop {name}` ends it", file=sys.stderr)
            raise
        if problems:
            raise RunFailed(*problems)
        print(f"nothing of {name} that this command started is running", file=sys.stderr)
        end_by(signals[0])
