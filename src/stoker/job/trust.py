"""Keys of a job that let foreign code run. They are honoured in a user's own job file, not in a run's."""

from __future__ import annotations

from collections.abc import Callable

from stoker.errors import Problem
from stoker.job.load_job import LoadedJob
from stoker.job.task_spec import task_of

TRUST = ("trust_remote_code", "allow_pickle")  # keys of `model`


def option_of(key: str) -> str:
    """Formats a key as the option of commands on runs: ``model.allow_pickle=true`` as ``--allow-pickle``.

    A task that runs code is allowed by ``--trust-remote-code``, too.
    """
    name = key.removeprefix("model.").removesuffix("=true")
    return f"--{name.replace('_', '-')}" if name in TRUST else "--trust-remote-code"


def code_problems(loaded: LoadedJob, how: Callable[[str], str] = option_of) -> list[Problem]:
    """Returns a problem for each key of a run's ``job.yaml`` that lets code run and that this command line does not
    repeat.

    The keys were written by whoever trained the run, who may not be the user.

    Args:
        how: formats ``key=value`` for the command line.
    """
    job = loaded.job
    given = {
        f"task={job.task}": task_of(job).runs_code(job),
        **{f"model.{name}=true": job.model is not None and getattr(job.model, name) for name in TRUST},
    }
    return [
        loaded.problem(
            key.split("=")[0],
            f"{key.replace('=', ': ')} lets code run, and a run's own job.yaml does not decide that",
            f"if you trust where the run and its model come from, write {how(key)}",
        )
        for key, is_given in given.items()
        if is_given and loaded.origins[key.split("=")[0]].source != "override"
    ]
