"""Which attention heads a tensor process computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Range = tuple[int, int]


@dataclass(frozen=True)
class Heads:
    """A process' share of the attention heads, as ranges [start, stop).

    Query heads go with the key-value head that they share, so a process has whole groups; where the groups do not
    divide, some processes have one more. Where there are fewer groups than processes, several hold the same
    key-value head, each with an equal part of its query heads.

    Attributes:
        queries, keys: of ``query_heads`` and ``key_heads`` in all.
    """

    query_heads: int
    key_heads: int
    queries: Range
    keys: Range

    @property
    def repeated(self) -> bool:
        """Whether other processes hold the same key-value head."""
        return self.keys[1] - self.keys[0] == 1 and self.group < self.query_heads // self.key_heads

    @property
    def group(self) -> int:
        """Query heads on this process that share a key-value head."""
        return (self.queries[1] - self.queries[0]) // (self.keys[1] - self.keys[0])

    def own(self, whole: int) -> int:
        """This process' part of a number that counts query heads, or is a multiple of their count."""
        return whole * (self.queries[1] - self.queries[0]) // self.query_heads


def share_heads(config: Any, processes: int, index: int) -> Heads | None:
    """The share of one of several processes; None where the heads cannot be shared out."""
    query_heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or query_heads
    group = query_heads // key_heads
    if key_heads >= processes:
        keys = (key_heads * index // processes, key_heads * (index + 1) // processes)
        return Heads(query_heads, key_heads, (keys[0] * group, keys[1] * group), keys)
    if processes % key_heads or query_heads % processes:
        return None
    own = query_heads // processes
    key = index // (processes // key_heads)
    return Heads(query_heads, key_heads, (index * own, (index + 1) * own), (key, key + 1))
