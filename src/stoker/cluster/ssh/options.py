"""Problems of what a target passes to ssh: words that it would misread, and settings that are given twice."""

from __future__ import annotations

import re
from collections.abc import Mapping

from stoker.cluster.chosen_target import ChosenTarget
from stoker.cluster.ssh.host_file import word_problem
from stoker.errors import Problem
from stoker.job.targets.ssh import SshBlock

# Options of ssh_config that a key of the block sets.
OWN_KEYS = {"proxyjump": "jump", "port": "ssh_port", "user": "user"}


def option_problems(chosen: ChosenTarget, block: SshBlock) -> list[Problem]:
    """Returns problems of what is passed to ssh: words that it would misread, and options that are given twice."""
    problems = []
    for part in (block.jump or "").split(",") if block.jump else ():
        if why := word_problem(part.removeprefix("ssh://")) if part else f"`{block.jump}` names no host":
            problems.append(chosen.problem("jump", why, "write, for example, me@login:22"))
    if block.user is not None and (why := word_problem(block.user)):
        problems.append(chosen.problem("user", why, "write, for example, me"))
    problems += ssh_option_problems(chosen, "options", block.options)
    given = {name.lower(): name for name in block.options}
    for option, key in OWN_KEYS.items():
        if option in given and key in block.model_fields_set and getattr(block, key) is not None:
            message = f"`{key}` and the option {given[option]} of ssh both set the same"
            problems.append(chosen.problem(f"options.{given[option]}", message, "keep one of them"))
    return problems


def ssh_option_problems(chosen: ChosenTarget, key: str, options: Mapping[str, str]) -> list[Problem]:
    """Returns problems of options of ssh_config: names that are none, and values of several lines."""
    problems = []
    for name, value in options.items():
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9]*", name):
            hint = "write, for example, {StrictHostKeyChecking: accept-new}"
            problems.append(chosen.problem(key, f"`{name}` is not the name of an option of ssh_config", hint))
        elif "\n" in value or "\r" in value:
            problems.append(chosen.problem(f"{key}.{name}", "the value has several lines", "write it on one line"))
    return problems
