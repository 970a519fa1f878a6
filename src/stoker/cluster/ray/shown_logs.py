"""How much of the logs of all nodes has been shown; a node that is lost or slow takes nothing of it along."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from stoker.cluster.log_files import LogFile

Key = tuple[str, str]  # (name, inode) of a file, which identify it on storage that several nodes share


@dataclass(frozen=True)
class NodeLines:
    """A node's answer: new lines, each with its file, and how far each file has been read with them."""

    lines: list[tuple[Key, str]]
    read: Mapping[Key, LogFile]


@dataclass
class ShownLogs:
    """The logs that have been shown.

    Attributes:
        read: how far each file has been; every node is asked for what comes after it.
    """

    read: Mapping[Key, LogFile] = field(default_factory=dict)

    def take(self, answers: Iterable[NodeLines]) -> Iterator[str]:
        """Yields the new lines of the nodes' answers to one question. A file that several nodes read counts once.

        A node whose file system caches an earlier size takes the file as replaced and reads it from the start. Logs
        are only appended to, so what is behind the offset that was asked for is not taken.
        """
        asked, shown = self.read, dict(self.read)
        for answer in answers:
            news = {
                key: file
                for key, file in answer.read.items()
                if shown.get(key) == asked.get(key) and (key not in asked or file.offset >= asked[key].offset)
            }
            yield from (line for key, line in answer.lines if key in news)
            shown |= news
        self.read = shown
