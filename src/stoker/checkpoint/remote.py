"""Checkpoints at a URL, in any store that fsspec supports.

Files cannot be renamed there. So each attempt at a checkpoint has its own folder, ``step-00000060-<who>``, and becomes
a checkpoint when ``state.json``, the last file, is written.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import IO, Any

from stoker.checkpoint.storage import ATTEMPT, OWNER, STATE, attempt_name, is_alive, step_of
from stoker.errors import Problem, UserError, typed_reason
from stoker.files import free_name
from stoker.node_cache.object_cache import node_cache
from stoker.node_cache.urls import LOCAL, place_problem, scheme_of


def open_remote(url: str) -> IO[bytes]:
    """Opens a checkpoint file through the node cache: it is downloaded once for all processes.

    Raises:
        FileNotFoundError: the file does not exist.
        RunFailed: it cannot be downloaded.
    """
    from fsspec.core import url_to_fs

    if scheme_of(url) in (*LOCAL, "memory"):
        system, name = url_to_fs(url)
        file: IO[bytes] = system.open(name, "rb")
        return file
    cache = node_cache()
    try:
        path, pin = cache.fetch(cache.version(url))
    except UserError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise FileNotFoundError(url) from error
        raise
    with pin:  # an open file stays readable
        return path.open("rb")


@contextmanager
def os_errors() -> Iterator[None]:
    """Turns errors of a store's library into OSErrors: an endpoint that cannot be reached is none in botocore."""
    try:
        yield
    except (OSError, UserError):
        raise
    except Exception as error:
        if type(error).__module__ == "builtins":  # a bug
            raise
        raise OSError(errno.EIO, typed_reason(error)) from error


@dataclass(frozen=True)
class RemoteStorage:
    """Storage at a URL: each attempt has its own folder, and is a checkpoint once ``state.json`` is in it.

    `LocalStorage` describes the methods.
    """

    place: str

    @cached_property
    def _root(self) -> tuple[Any, str]:
        """The file system, and the path in it."""
        from fsspec.core import url_to_fs

        if problem := place_problem(self.place):
            message, hint = problem
            raise UserError(Problem(f"{self.place} cannot hold checkpoints: {message}", hint, key="checkpoint.to"))
        system, path = url_to_fs(self.place)
        return system, path.rstrip("/")

    def _whole(self) -> dict[int, str]:
        """Returns the newest complete attempt of each step."""
        system, root = self._root
        whole = {}
        for name in sorted(self._attempts()):
            if system.exists(f"{root}/{name}/{STATE}"):
                whole[step_of(name)] = name
        return whole

    def _attempt(self, step: int) -> str:
        """Returns the newest complete attempt of a step.

        Raises:
            FileNotFoundError: there is none.
        """
        attempt = self._whole().get(step)
        if attempt is None:
            raise FileNotFoundError(f"there is no checkpoint of step {step} in {self.place}")
        return attempt

    def _attempts(self) -> list[str]:
        system, root = self._root
        system.invalidate_cache()
        if not system.exists(root):
            return []
        names = [path.rstrip("/").rpartition("/")[2] for path in system.ls(root, detail=False)]
        return [name for name in names if ATTEMPT.fullmatch(name)]

    @os_errors()
    def steps(self) -> list[int]:
        return sorted(self._whole())

    @os_errors()
    def path(self, step: int) -> str:
        return f"{self.place.rstrip('/')}/{self._attempt(step)}"

    @os_errors()
    def begin(self, step: int, maker: int) -> str | None:
        if step in self._whole():
            return None
        attempt = attempt_name(step, maker)
        system, root = self._root
        system.makedirs(f"{root}/{attempt}", exist_ok=True)  # no effect where folders are only name prefixes
        return attempt

    @contextmanager
    def create(self, attempt: str, name: str) -> Iterator[IO[bytes]]:
        system, root = self._root
        with os_errors(), system.open(f"{root}/{attempt}/{name}", "wb") as file:
            yield file

    @os_errors()
    def names(self, attempt: str) -> set[str]:
        system, root = self._root
        system.invalidate_cache()
        return {path.rpartition("/")[2] for path in system.ls(f"{root}/{attempt}", detail=False)}

    @os_errors()
    def read(self, attempt: str, name: str) -> bytes:
        system, root = self._root
        return bytes(system.cat_file(f"{root}/{attempt}/{name}"))

    @os_errors()
    def remove(self, attempt: str, name: str) -> None:
        system, root = self._root
        system.rm_file(f"{root}/{attempt}/{name}")

    @os_errors()
    def commit(self, attempt: str, state: bytes) -> None:
        with self.create(attempt, STATE) as file:
            file.write(state)

    @os_errors()
    def give_up(self, attempt: str) -> None:
        system, root = self._root
        if system.exists(f"{root}/{attempt}"):
            system.rm(f"{root}/{attempt}", recursive=True)

    @os_errors()
    def sizes(self, step: int) -> dict[str, int]:
        system, root = self._root
        system.invalidate_cache()
        files = {
            info["name"].rpartition("/")[2]: info for info in system.ls(f"{root}/{self._attempt(step)}", detail=True)
        }
        return {name: int(info["size"]) for name, info in sorted(files.items()) if name != STATE}

    def open(self, step: int, name: str) -> IO[bytes]:
        return open_remote(f"{self.path(step)}/{name}")

    def room(self) -> int | None:
        return None

    @os_errors()
    def put_aside(self, step: int) -> str:
        system, root = self._root
        aside = self._attempt(step)
        system.mv(f"{root}/{aside}/{STATE}", f"{root}/{aside}/damaged-{STATE}")
        return f"{self.place.rstrip('/')}/{aside}"

    @os_errors()
    def put_all_aside(self, name: str) -> str:
        self.clean()
        system, root = self._root
        name = free_name(name, lambda one: system.exists(f"{root}/{one}"))
        for attempt in self._attempts():
            system.copy(f"{root}/{attempt}", f"{root}/{name}/{attempt}", recursive=True)
            self.give_up(attempt)
        if system.exists(f"{root}/{OWNER}"):
            system.mv(f"{root}/{OWNER}", f"{root}/{name}/{OWNER}")
        return name

    @os_errors()
    def owner(self) -> bytes | None:
        system, root = self._root
        system.invalidate_cache()
        try:
            return bytes(system.cat_file(f"{root}/{OWNER}"))
        except FileNotFoundError:
            return None

    @os_errors()
    def claim(self, owner: bytes, *, replaces: bool) -> None:
        system, root = self._root
        system.makedirs(root, exist_ok=True)  # no effect where folders are only name prefixes
        if not replaces:
            try:
                return system.pipe_file(f"{root}/{OWNER}", owner, mode="create")
            except Exception as error:  # a store without conditional writes also fails
                if self.owner() is not None:
                    raise FileExistsError(f"{self.place}/{OWNER}") from error
        return system.pipe_file(f"{root}/{OWNER}", owner)

    @os_errors()
    def delete(self, step: int) -> None:
        system, root = self._root
        doomed = self._attempt(step)
        system.rm_file(f"{root}/{doomed}/{STATE}")
        system.rm(f"{root}/{doomed}", recursive=True)

    @os_errors()
    def clean(self) -> None:
        for name in self._unfinished():
            if not is_alive(name):
                self.give_up(name)

    @os_errors()
    def attempts_after(self, step: int) -> list[str]:
        return [name for name in self._unfinished() if step_of(name) > step]

    @os_errors()
    def pending(self) -> list[int]:
        return [step_of(name) for name in self._unfinished() if is_alive(name)]

    def _unfinished(self) -> list[str]:
        """Returns the attempts that are neither checkpoints nor set aside."""
        system, root = self._root
        whole = set(self._whole().values())
        names = [name for name in self._attempts() if name not in whole]
        return [name for name in names if not system.exists(f"{root}/{name}/damaged-{STATE}")]
