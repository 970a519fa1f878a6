"""The lock of a submission on a host: one command at a time submits or resumes it, from whichever machine."""

from __future__ import annotations

import secrets
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from stoker.cluster.shell import Shell, ShellFailed, on_all
from stoker.errors import Problem, UserError

LOCK = ".claim"  # in the folder of the submission; its content is the token of the command that holds it
CLAIMED = "stoker-claimed"  # printed by the script: what a login prints may come before
TAKEN = 9  # exit code of the script
GRACE = 2.0  # seconds in which the process ends by itself


def claim_script(home: str, token: str) -> str:
    """Returns a script that prints `CLAIMED`, and holds the lock of a folder until its input ends.

    It ends with the code `TAKEN` where another command holds the lock. Where this one does, on a host that shares the
    folder, it needs no second one.
    """
    return (
        f"cd {home} && exec 9>>{LOCK} || exit 1; "
        f'if output=$(flock -n 9 2>&1) || [ -n "$output" ]; then echo {token} > {LOCK}; '
        f'else [ "$(cat {LOCK})" = {token} ] || exit {TAKEN}; fi; echo {CLAIMED}; exec cat >/dev/null'
    )


@contextmanager
def claimed_on_all(shells: Sequence[Shell], home: str, name: str) -> Iterator[None]:
    """A context that holds the lock of a run on several hosts; see `claimed`.

    The first host by name is asked alone, so that one of two commands with the same hosts gets all locks.
    """
    token = secrets.token_hex(8)
    first, *others = sorted(shells, key=lambda shell: shell.name)
    with ExitStack() as stack:
        stack.enter_context(claimed(first, home, name, token))
        on_all(others, lambda shell: stack.enter_context(claimed(shell, home, name, token)))
        yield


@contextmanager
def claimed(shell: Shell, home: str, name: str, token: str = "") -> Iterator[None]:
    """A context that holds the lock of a run, whose folder it makes.

    A process on the host holds it until its standard input ends: with the context, this process or the connection. So
    no lock outlives its command. Where the host has no `flock`, or its file system no locks, there is none.

    Args:
        home: the run's folder, in shell syntax.
        token: of the command, which holds the locks of several hosts.

    Raises:
        UserError: another command holds the lock.
        ShellFailed: the folder cannot be made, or the host cannot be reached.
    """
    shell.run(f"mkdir -p {home} && chmod 700 {home}")
    words, pipe = shell.words(claim_script(home, token or secrets.token_hex(8))), subprocess.PIPE
    with (
        tempfile.TemporaryFile() as stderr,  # a pipe that nobody reads would fill up
        subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=stderr, start_new_session=True) as holder,
    ):
        assert holder.stdin is not None and holder.stdout is not None
        try:
            if not any(line.strip() == CLAIMED.encode() for line in holder.stdout):
                code = holder.wait()
                if code == TAKEN:
                    message = f"another command is submitting or resuming {name} (it holds {LOCK} on {shell.name})"
                    raise UserError(Problem(message, f"wait for it; then `stoker describe {name}`"))
                stderr.seek(0)
                raise ShellFailed(shell.name, code, stderr.read().decode(errors="replace"))
            yield
        finally:
            holder.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                holder.wait(GRACE)
            holder.kill()
