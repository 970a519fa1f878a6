"""Options of sbatch that the user adds: those that Stoker writes itself, or that a run cannot have, are refused."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from itertools import chain

from stoker.job.targets.slurm import SlurmBlock

# Long options that Stoker writes, and what to use instead (man sbatch).
WRITTEN = {
    "job-name": "use `--name` of `stoker submit`",
    "comment": "Stoker writes the fingerprint there",
    "nodes": "write `nodes:`",
    "ntasks": "write `devices:`, the processes of a node",
    "ntasks-per-node": "write `devices:`, the processes of a node",
    "gres": "write `gres:`",
    "cpus-per-task": "write `cpus:`",
    "time": "write `time:`",
    "output": "the log is in `folder`; `stoker logs` prints it",
    "error": "the log is in `folder`; `stoker logs` prints it",
    "open-mode": "Stoker appends to the log",
    "signal": "write `warn:`, in seconds",
    "requeue": "write `requeue:`, how many times",
    "no-requeue": "write `requeue: 0`",
    "no-kill": "write `faults: {nodes: {min: N, max: M}}` in the job",
    "chdir": "the job works in the folder in which it is submitted",
    "array": "remove it",
    "wrap": "remove it",
    "test-only": "use `stoker submit --dry-run`",
    "parsable": "use `stoker submit --json`",
}
# Long options that Stoker writes if the key is given.
OF_KEYS = {
    "mem": "memory",
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "reservation": "reservation",
    "constraint": "constraint",
    "nodelist": "nodelist",
    "exclude": "exclude",
    "exclusive": "exclusive",
}
SHORT = {
    "a": "array", "A": "account", "c": "cpus-per-task", "C": "constraint", "D": "chdir", "e": "error",
    "J": "job-name", "n": "ntasks", "N": "nodes", "o": "output", "p": "partition", "q": "qos", "t": "time",
    "k": "no-kill", "w": "nodelist", "x": "exclude",
}  # fmt: skip
WITHOUT_VALUE = "HIOQsvVWh"  # short options that others can follow in one word


def option_problem(block: SlurmBlock, option: str) -> tuple[str, str] | None:
    """Returns the message and suggestion for an option that cannot be added; None if it can."""
    try:
        words = shlex.split(option)
    except ValueError:
        return f"`{option}` has a quote that is not closed", "close it"
    if not words or not words[0].startswith("-") or not words[0].strip("-"):
        return f"`{option}` is not an option", f"write `--{option.strip(' -') or 'mail-type=END'}`"
    options = chain.from_iterable(_names(word) for word in words if word.startswith("-"))
    for name in options:
        if name == "array":
            return "an array starts the job several times, and a run is one job", WRITTEN[name]
        if name in WRITTEN:
            return f"`{option}`: Stoker writes --{name} itself", WRITTEN[name]
        key = OF_KEYS.get(name)
        if key is not None and getattr(block, key) not in (None, False):
            return f"`{option}`: `{key}` is given, from which Stoker writes --{name}", "keep one of the two"
    return None


def _names(word: str) -> Iterator[str]:
    """Yields the long options that a word may stand for: itself, those of which it is the beginning, short ones."""
    if word.startswith("--"):
        name = word[2:].partition("=")[0]
        exact = name in WRITTEN or name in OF_KEYS
        for known in (*WRITTEN, *OF_KEYS):
            if known == name or (not exact and name and known.startswith(name)):
                yield known
        return
    for letter in word[1:]:
        if letter in SHORT:
            yield SHORT[letter]
        if letter not in WITHOUT_VALUE:
            return
