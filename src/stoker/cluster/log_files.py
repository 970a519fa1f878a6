"""Log files on other machines, read on from the last offset."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from stoker.cluster.shell import Shell, ShellFailed, on_all

POLL = 1.0  # seconds between two looks
MOST = 4 * 2**20  # bytes of a file that one look brings
UNREACHED = "cannot be reached"
LABEL = re.compile(r"(?:[\w-]+ )?rank (\d+) \| ?")  # of a line of a rank, with the stage's name before it
_RANK = re.compile(r"rank-(\d+)\.log$")


@dataclass(frozen=True)
class LogPlace:
    """The place of logs on one host.

    Attributes:
        pattern: their paths, as a shell pattern.
        label: returns the prefix of each line, for a path.
    """

    shell: Shell
    pattern: str
    label: Callable[[str], str]


@dataclass
class LogFile:
    """A file that is being read.

    Attributes:
        label: the prefix of its lines.
        offset: bytes read so far.
        begun: the last line, while it is incomplete.
    """

    label: str
    offset: int = 0
    begun: bytes = b""


def rank_of(path: str) -> int | None:
    """Returns the rank of a log's name; None of another file."""
    found = _RANK.search(path)
    return int(found[1]) if found else None


def rank_label(path: str) -> str:
    """``rank 3`` of a rank's log."""
    return f"rank {rank_of(path)}"


def of_rank(lines: Iterable[str], rank: int | None) -> Iterator[str]:
    """Yields the lines of one rank without their labels; all lines if it is None."""
    for line in lines:
        label = LABEL.match(line)
        if rank is None:
            yield line
        elif label is not None and int(label[1]) == rank:
            yield line[label.end() :]


def run_logs(shell: Shell, folder: str) -> list[LogPlace]:
    """Returns the logs of a run's processes, and those of the runs of its stages.

    Args:
        folder: of the run, or of all stages, as the shell reads it.
    """
    return [
        LogPlace(shell, f"{folder}/logs/rank-*.log", rank_label),
        LogPlace(shell, f"{folder}/*/logs/rank-*.log", lambda path: f"{path.split('/')[-3]} {rank_label(path)}"),
    ]


def read_logs(
    places: Sequence[LogPlace], *, rank: int | None, follow: bool, ended: Callable[[], bool]
) -> Iterator[str]:
    """Yields lines of all files, each with its label before it; of one rank without.

    A file that several hosts see (the same name and the same inode) is read once.

    Args:
        follow: continue until the job has ended.
        ended: whether it has.

    A host that cannot be reached is reported in a separate line.
    """
    known: dict[tuple[str, str], LogFile] = {}
    last = not follow
    while True:
        before = sum(file.offset for file in known.values())
        for _, line in new_lines(places, known, rank=rank):
            yield line
        if sum(file.offset for file in known.values()) != before:
            continue
        if last:
            break
        last = ended()  # what it wrote before its end is read after this
        if not last:
            time.sleep(POLL)
    for file in known.values():
        if file.begun:
            yield _shown(file, file.begun, alone=rank is not None)


def new_lines(
    places: Sequence[LogPlace], known: dict[tuple[str, str], LogFile], *, rank: int | None
) -> Iterator[tuple[tuple[str, str], str]]:
    """Lines that have come since the last look, each with the (name, inode) of its file.

    Args:
        known: how far each file has been read; it is brought up to date.
    """
    for key, content in _new(places, known, rank):
        file = known[key]
        *lines, file.begun = (file.begun + content).split(b"\n")
        for line in lines:
            yield key, _shown(file, line, alone=rank is not None)


def _shown(file: LogFile, line: bytes, *, alone: bool) -> str:
    text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]  # the final state of a progress line
    return text if alone else f"{file.label} | {text}"


def _new(
    places: Sequence[LogPlace], known: dict[tuple[str, str], LogFile], rank: int | None
) -> Iterator[tuple[tuple[str, str], bytes]]:
    """Yields the files that have grown, with their new bytes."""
    hosts: dict[int, list[LogPlace]] = {}
    for place in places:
        hosts.setdefault(id(place.shell), []).append(place)
    listed = on_all(list(hosts.values()), _listed_or_why)
    seen: set[tuple[str, str]] = set()  # hosts share folders: another's size, listed before this read, is no other file
    for (first, *_), files in zip(hosts.values(), listed, strict=True):
        shell = first.shell
        if isinstance(files, ShellFailed):
            key = (shell.name, UNREACHED)
            if key not in known:  # reported once; the logs of the other hosts are shown
                known[key] = LogFile(shell.name)
                yield key, f"{files.stderr}\n".encode()
            continue
        wanted: dict[tuple[str, str], tuple[str, int]] = {}
        for place, size, inode, path in files:
            if rank is not None and rank_of(path) != rank:
                continue
            key = (path.rpartition("/")[2], inode)
            if key in seen:
                continue
            seen.add(key)
            file = known.setdefault(key, LogFile(place.label(path)))
            if size < file.offset:  # it was replaced
                file.offset, file.begun = 0, b""
            length = min(size - file.offset, MOST)
            if length > 0:
                wanted[key] = path, length
        if not wanted:
            continue
        asked = "".join(f"{known[key].offset + 1} {length} {path}\n" for key, (path, length) in wanted.items())
        script = 'while read -r o n p; do tail -c +$o "$p" | head -c $n; done'
        content = shell.run(script, given=asked.encode())
        for key, (_, length) in wanted.items():
            part, content = content[:length], content[length:]
            known[key].offset += len(part)
            yield key, part


def _listed_or_why(places: Sequence[LogPlace]) -> list[tuple[LogPlace, int, str, str]] | ShellFailed:
    try:
        return _listed(places)
    except ShellFailed as error:
        return error


def _listed(places: Sequence[LogPlace]) -> list[tuple[LogPlace, int, str, str]]:
    """(place, size, inode, path) of each file, in one command: each costs processes on both sides.

    Args:
        places: on one host.
    """
    script = "; ".join(f"stat -c '{index} %s %i %n' {place.pattern} 2>/dev/null" for index, place in enumerate(places))
    found = []
    for line in places[0].shell.run(f"{script}; :").decode().splitlines():
        index, size, inode, path = line.split(" ", 3)
        found.append((int(index), int(size), inode, path))
    found.sort(key=lambda one: (one[0], rank_of(one[3]) or 0, one[3]))
    return [(places[index], size, inode, path) for index, size, inode, path in found]
