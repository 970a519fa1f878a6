"""The environment variables that the nodes of a submitted job get, and the file with them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from fnmatch import fnmatchcase

from stoker.cluster.secret_names import has_password
from stoker.job.targets.shared_keys import TargetKeys

ENVIRONMENT = "environment.sh"
_HIDDEN = re.compile(r"TOKEN|KEY|SECRET|PASS|PW|AUTH|CREDENTIAL", re.I)  # anywhere in a name: it may hide too much
_NAME = re.compile(r"[A-Za-z_]\w*")


def variables(keys: TargetKeys, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that the nodes get: those of this shell that the target forwards, then its own."""
    handed = {
        name: value
        for name, value in sorted(environment.items())
        if any(fnmatchcase(name, pattern) for pattern in keys.forward) and _NAME.fullmatch(name)
    }
    return {**handed, **keys.environment}


def environment_text(values: Mapping[str, str], *, hidden: bool = False) -> str:
    """Returns the file of variables.

    Args:
        hidden: mask the values of variables whose names suggest secrets, and URLs with passwords.
    """
    return "".join(
        f"export {name}={'...' if hidden and (_HIDDEN.search(name) or has_password(value)) else shlex.quote(value)}\n"
        for name, value in values.items()
    )
