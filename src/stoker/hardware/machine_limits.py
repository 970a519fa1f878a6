"""Recognises errors of the machine (memory, open files, disk space) and of lost processes, whichever library raises
them.
"""

from __future__ import annotations

import errno
import resource
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError

from stoker.errors import Problem, RunFailed, chained

MEMORY = "there is not enough memory"
FILES = "too many files are open"
SPACE = "the disk is full"
READ_ONLY = "the file system is read-only"
FEWEST_FILES = 64  # with fewer, no process of a run can talk to another
LEAST_MEMORY = 1 << 30  # bytes of address space; with less, no process of a run starts
NEARLY = 0.8  # of the address space that a process may have
LIMITS = {FILES: resource.RLIMIT_NOFILE, MEMORY: resource.RLIMIT_AS}
OF_ERRNO = {
    errno.ENOMEM: MEMORY,
    errno.EMFILE: FILES,
    errno.ENFILE: FILES,
    errno.ENOSPC: SPACE,
    errno.EDQUOT: SPACE,
    errno.EROFS: READ_ONLY,
}
# Messages of libraries without a specific error: the loader of shared objects, PyTorch, threads, Rust.
PHRASES = (
    ("cannot allocate memory", MEMORY),
    ("can't allocate memory", MEMORY),
    ("failed to map segment", MEMORY),
    ("can't start new thread", MEMORY),
    ("bad_alloc", MEMORY),
    ("too many open files", FILES),
    ("no space left on device", SPACE),
    ("disk quota exceeded", SPACE),
)
UNSPECIFIC = (OSError, RuntimeError, ImportError, SystemError, SafetensorError)
# Messages of a collective whose peer is gone, and of the rendezvous store. The reason is in the process that is gone.
PEER_IS_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "TCPStore", "gloo")


def is_peer_gone(error: BaseException) -> bool:
    """Returns whether communication failed, probably because another process of the run has gone."""
    words = f"{type(error).__name__}: {error}"
    return isinstance(error, (RuntimeError, ConnectionError)) and any(sign in words for sign in PEER_IS_GONE)


def check_limits() -> None:
    """Raises RunFailed where this shell allows too little for any process of a run."""
    for what, least in ((FILES, FEWEST_FILES), (MEMORY, LEAST_MEMORY)):
        limit = resource.getrlimit(LIMITS[what])[0]
        if limit != resource.RLIM_INFINITY and limit < least:
            raise RunFailed(Problem(what, _advice(what)))


def machine_problem(error: BaseException) -> Problem | None:
    """Returns the exhausted resource that caused an error or one in its chain; None otherwise."""
    for each in chained(error):
        if (what := _lacking(each)) is not None:
            name = getattr(each, "filename", None)
            return Problem(what, _advice(what), file=name if isinstance(name, str) else "")
    return None


def _lacking(error: BaseException) -> str | None:
    if isinstance(error, MemoryError):
        return MEMORY
    if isinstance(error, OSError) and error.errno in OF_ERRNO:
        return OF_ERRNO[error.errno]
    if isinstance(error, UNSPECIFIC) or type(error) is Exception:
        text = str(error).lower()
        return next((what for phrase, what in PHRASES if phrase in text), None) or _starved()
    return None


def _starved() -> str | None:
    """Returns the resource that is too scarce for libraries to report proper errors; None if all suffice."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < FEWEST_FILES:
        return FILES
    memory, _ = resource.getrlimit(resource.RLIMIT_AS)
    with suppress(OSError, MemoryError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        if memory != resource.RLIM_INFINITY and pages * resource.getpagesize() > NEARLY * memory:
            return MEMORY
    return None


def _advice(what: str) -> str:
    if what == FILES:
        return f"this shell allows {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}: raise it with `ulimit -n 4096`"
    if what == MEMORY:
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            return f"this shell allows a process {limit / 2**30:.1f} GiB: raise it with `ulimit -v unlimited`"
        return "close other programs, or train less at once (train.micro_batch, train.seq_len, a smaller model)"
    return "free some space" if what == SPACE else "choose a folder that can be written"
