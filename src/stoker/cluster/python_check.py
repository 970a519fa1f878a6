"""Checks the Python of a host before a submission: its version, and the packages that the job needs."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires

from stoker.cluster.environment import environment_text, variables
from stoker.cluster.shell import Shell, python_word
from stoker.cluster.submission import Submission
from stoker.job.targets.shared_keys import TargetKeys
from stoker.node_cache.job_urls import urls_of
from stoker.node_cache.urls import EXTRAS, scheme_of

PYTHON = (3, 11)
HINT = "write the path of a Python with Stoker's dependencies, or `setup` commands that lead to it"
OWN = "stoker"
LACKS = "lacks:"
_REQUIREMENT = re.compile(r"(?P<needed>(?P<name>[\w.-]+)[^;]*)(?:;.*extra == .(?P<extra>[\w-]+).)?")
# Prints the modules of its arguments that are not there. None of them is imported.
_CODE = f"""
import sys
if sys.version_info < {PYTHON}: sys.exit(3)
import importlib.util
def lacks(name):
    try: return importlib.util.find_spec(name) is None
    except ImportError: return True
sys.stdout.write(" ".join(["{LACKS}"] + [name for name in sys.argv[1:] if lacks(name)]))
"""


@dataclass(frozen=True)
class PythonProblem:
    """What is wrong with a host's Python, and what to do.

    Attributes:
        is_absent: whether there is none.
    """

    message: str
    hint: str = HINT
    is_absent: bool = False


def requirements_of(submission: Submission) -> list[str]:
    """Returns what the nodes of a job need, as pip takes it: Stoker's dependencies, the packages for URLs of the jobs,
    and Stoker itself if its code is not sent.
    """
    extras = {EXTRAS.get(scheme_of(url)) for job in submission.jobs for url in urls_of(job)}
    try:
        stated = requires(OWN) or []
    except PackageNotFoundError:  # run from its source, without installation
        stated = ["torch"]
    matches = [match for text in stated if (match := _REQUIREMENT.match(text)) is not None]
    own = [] if submission.sends_code else [OWN]
    return [*own, *(m["needed"].strip() for m in matches if m["extra"] is None or m["extra"] in extras)]


def python_problem(shell: Shell, keys: TargetKeys, needed: Sequence[str], patience: float) -> PythonProblem | None:
    """Returns why a host has no suitable Python; None if it has one.

    Args:
        needed: requirements, as `requirements_of` returns them.
        patience: seconds within which the host answers.

    Raises:
        ShellFailed: it cannot be reached.
    """
    python = python_word(keys.python)
    by_module = {_module_of(requirement): requirement for requirement in needed}
    ready = ['eval "$(cat)"', *keys.setup, f"command -v {python} >/dev/null || exit 5"]
    lines = ["(", "{", *ready, "} >/dev/null", f"{python} -c {shlex.quote(_CODE)} {shlex.join(by_module)}", ")"]
    given = environment_text(variables(keys, os.environ)).encode()  # what packages are found may depend on it
    script = "\n".join([*lines, "code=$?; echo; echo $code"])
    output = shell.run(script, given=given, timeout=patience + 60).decode().splitlines()
    match output[-1] if output else "":
        case "0":
            found = next((line for line in output if line.startswith(LACKS)), LACKS)
            return _lacking(keys.python, [by_module[name] for name in found.split()[1:]])
        case "3":
            return PythonProblem(f"{keys.python} is older than {'.'.join(map(str, PYTHON))}")
        case "5":
            return PythonProblem(f"there is no {keys.python}", is_absent=True)
    return PythonProblem("the setup commands fail")


def _lacking(python: str, missing: Sequence[str]) -> PythonProblem | None:
    if not missing:
        return None
    names = ", ".join(_name_of(requirement) for requirement in missing)
    if OWN in missing:
        return PythonProblem(
            f"{python} has no {names}", "install the wheel of `make wheel` there, or write `code: true`"
        )
    return PythonProblem(f"{python} has no {names}", f"run there: {python} -m pip install {shlex.join(missing)}")


def _name_of(requirement: str) -> str:
    match = _REQUIREMENT.match(requirement)
    assert match is not None
    return match["name"]


def _module_of(requirement: str) -> str:
    """Returns the module of a dependency of Stoker; its name differs from the package's in hyphens only."""
    return _name_of(requirement).replace("-", "_")
