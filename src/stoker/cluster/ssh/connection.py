"""A connection by OpenSSH, with the user's settings, agent and jump hosts, shared by all commands."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stoker.cluster.shell import Given, ShellFailed, finished
from stoker.cluster.ssh.kept_shell import KeptShell, NotRunError, takes
from stoker.errors import RunFailed

UNREACHED = 255  # exit code of ssh itself
LONGEST = 30  # characters of the folder that contains the sockets' folder
PERSIST = 120  # seconds for which a connection stays open after its last command


@dataclass(frozen=True)
class SshSettings:
    """Settings of ssh in addition to the host.

    Attributes:
        identity, jump, config: as `ssh -i`, `-J` and `-F` take them; empty for ssh's own.
        options: of ssh_config; they override Stoker's.
        connect: seconds within which a host must answer.
    """

    identity: str = ""
    jump: str = ""
    config: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    connect: int = 15

    def words(self) -> list[str]:
        """Returns the options of an ssh command. ssh takes the first value of an option: the user's come first.

        Only commands of equal settings share a connection: of those that join it, ssh drops options such as ``SetEnv``.
        """
        settings = json.dumps([self.identity, self.jump, self.config, dict(self.options)])
        shared = hashlib.blake2b(settings.encode(), digest_size=4).hexdigest()
        own = {
            "BatchMode": "yes",  # never prompt
            "ConnectTimeout": str(self.connect),
            "ServerAliveInterval": "15",
            "ServerAliveCountMax": "4",
            "ControlMaster": "auto",
            "ControlPath": f"{control_folder()}/{shared}-%C",
            "ControlPersist": str(PERSIST),
        }
        given = {name.lower() for name in self.options}
        words = []
        for flag, value in (("-F", self.config), ("-i", self.identity), ("-J", self.jump)):
            words += [flag, str(Path(value).expanduser()) if flag != "-J" else value] if value else []
        for name, value in (*self.options.items(), *((n, v) for n, v in own.items() if n.lower() not in given)):
            words += ["-o", f"{name}={value}"]
        return words


@dataclass
class Connection:
    """Runs scripts on a host by ssh, those with little input in one shell that stays open.

    Attributes:
        name: of the host, in ssh's configuration or DNS.
        user, port: where they differ from ssh's own.
    """

    name: str
    settings: SshSettings
    user: str = ""
    port: int | None = None
    _shell: KeptShell | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def ssh(self) -> list[str]:
        """The command without host and script."""
        port = ["-p", str(self.port)] if self.port is not None else []
        return ["ssh", *self.settings.words(), *port]

    @property
    def destination(self) -> str:
        """The host, with the user where one is named."""
        return f"{self.user}@{self.name}" if self.user else self.name

    def words(self, script: str) -> list[str]:
        """Returns the command that runs a script there, whatever the user's login shell."""
        return [*self.ssh, "--", self.destination, f"sh -c {shlex.quote(script)}"]

    def run(self, script: str, *, given: Given = b"", timeout: float | None = None) -> bytes:
        try:
            if takes(script, given) and (shell := self._kept()) is not None:
                assert isinstance(given, bytes)
                try:
                    return shell.run(script, given=given, timeout=timeout)
                except NotRunError:
                    if not shell.is_ready:  # the host cannot be reached
                        raise
            return finished(self.words(script), self.name, given, timeout)
        except ShellFailed as error:
            if error.code == UNREACHED:
                raise ShellFailed(self.name, UNREACHED, f"cannot be reached: {_last_line(error.stderr)}") from None
            raise

    def _kept(self) -> KeptShell | None:
        """Returns the shell that stays open; a new one if it has ended, None if there are too many."""
        if self._shell is None or not self._shell.is_open:
            self._shell = KeptShell.opened(["ssh", "-T", *self.ssh[1:], "--", self.destination], self.name)
        return self._shell

    def real_name(self) -> str:
        """Returns the host's name or address as ssh's configuration has it (`HostName`)."""
        words = [*self.ssh, "-G", "--", self.destination]
        try:
            lines = finished(words, self.name, b"", 30).decode().splitlines()
        except ShellFailed as error:
            raise ShellFailed(self.name, error.code, f"cannot be reached: {_last_line(error.stderr)}") from None
        return next((line.split(maxsplit=1)[1] for line in lines if line.startswith("hostname ")), self.name)

    def close(self) -> None:
        """Closes the shell and the shared connection that stay open for later commands."""
        if self._shell is not None:
            self._shell.close()
        words = [*self.ssh, "-O", "exit", "--", self.destination]
        subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False)


def control_folder() -> Path:
    """Returns a short path, private to this user, for the sockets of shared connections: a socket's path has at most
    107 bytes.

    Raises:
        RunFailed: it belongs to another user.
    """
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or "/nonexistent")
    temporary = next(path for path in (tempfile.gettempdir(), "/tmp") if len(path) <= LONGEST or path == "/tmp")
    path = Path(temporary) / f"stoker-ssh-{os.getuid()}"
    if len(str(runtime)) <= LONGEST and runtime.is_dir() and os.access(runtime, os.W_OK):  # it may be another user's
        path = runtime / "stoker"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise RunFailed(f"{path}, for connections that are kept, cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise RunFailed(f"{path} must be a folder that only you can enter; remove it, and try again")
    return path


def _last_line(text: str) -> str:
    """Returns ssh's own reason: its last line, without the full stop."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else "ssh gives no reason"
