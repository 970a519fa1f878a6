"""Whether the hub's cache has a repository, or the hub does; answers within seconds."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

from stoker.errors import Problem, RunFailed, UserError, reason_of
from stoker.job.paths import nearest_name

TIMEOUT, TRIES, PAUSE = 5.0, 2, 1.0  # in seconds; the hub's client takes 40 seconds for each file that it cannot fetch


def require_repository(
    name: str,
    kind: Literal["model", "dataset"],
    *,
    revision: str | None = None,
    hint: str = "",
    weights: bool = False,
) -> None:
    """Checks that a repository is in the hub's cache, or that the hub has it.

    Args:
        hint: what to write instead; by default a similar name in the current folder.
        weights: whether a model without weights in the cache is requested from the hub.

    Raises:
        UserError: the hub has no such repository, or its client is offline.
        RunFailed: the hub does not answer.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    cached = None
    near = nearest_name(name, Path.cwd())
    hint = hint or (f"did you mean {near}?" if near else "")
    try:
        cached = _snapshot(name, kind, revision)
        if cached is not None and (not weights or _has_weights(cached)):
            return
        if constants.HF_HUB_OFFLINE:
            message = f"{name} is neither here nor in the hub's cache, and HF_HUB_OFFLINE is set"
            if cached is not None:
                message = f"the hub's cache has no weights of {name}, and HF_HUB_OFFLINE is set"
            raise UserError(Problem(message, hint))
        _ask(name, kind, revision)
    except UserError:
        raise
    except HFValidationError as error:
        message = f"{name} is neither a path here nor an id of the hub: {reason_of(error)}"
        raise UserError(Problem(message, hint)) from error
    except RevisionNotFoundError as error:
        raise UserError(Problem(f"the hub has no revision {revision} of {name}", hint)) from error
    except RepositoryNotFoundError as error:
        message = f"{name} is neither here nor on {constants.ENDPOINT}"
        raise UserError(Problem(message, hint or "if it is private, log in with `hf auth login`")) from error
    except HfHubHTTPError:  # the hub answers, and its client waits if there are too many requests
        return
    except Exception as error:
        message = f"{name} is neither here nor in the hub's cache, and {constants.ENDPOINT} does not answer"
        if cached is not None:
            message = f"the hub's cache has no weights of {name}, and {constants.ENDPOINT} does not answer"
        raise RunFailed(Problem(f"{message}: {reason_of(error)}", hint)) from error


def _snapshot(name: str, kind: str, revision: str | None) -> Path | None:
    """Returns the folder of a repository's files in the cache; None if the cache does not have the repository."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type=kind)
    version = revision or constants.DEFAULT_REVISION
    reference = folder / "refs" / version
    snapshot = folder / "snapshots" / (reference.read_text().strip() if reference.is_file() else version)
    return snapshot if reference.is_file() or snapshot.is_dir() else None


def _has_weights(folder: Path) -> bool:
    return any(True for pattern in ("*.safetensors", "*.bin") for _ in folder.glob(pattern))


def _ask(name: str, kind: str, revision: str | None) -> None:
    """Requests a repository's description; repeats it if there is no answer."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    for _ in range(TRIES - 1):
        try:
            HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=TIMEOUT)
        except (HfHubHTTPError, HFValidationError):
            raise
        except Exception:  # of the client's HTTP library, which differs between versions of the client
            time.sleep(PAUSE)
        else:
            return
    HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=TIMEOUT)
