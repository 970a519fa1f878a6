"""The attention heads of a tensor process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from stoker.models.families.facts import Family, Region, submodule
from stoker.parallel.shard_spec import even_part

Range = tuple[int, int]


@dataclass(frozen=True)
class HeadShare:
    """A process' share of the attention heads, as ranges [start, stop).

    A process has whole groups of query heads with their key-value head; some processes have one more where the number
    of groups is not divisible. With fewer groups than processes, several hold the same key-value head, each with an
    equal part of its query heads.
    """

    query_heads: int
    key_heads: int
    queries: Range
    keys: Range

    @property
    def repeated(self) -> bool:
        """Returns whether other processes have the same key-value head."""
        return self.own_keys == 1 and self.group < self.query_heads // self.key_heads

    @property
    def group(self) -> int:
        """Query heads on this process that share a key-value head."""
        return (self.queries[1] - self.queries[0]) // self.own_keys

    @property
    def own_keys(self) -> int:
        """Key-value heads on this process."""
        return self.keys[1] - self.keys[0]

    def own(self, whole: int) -> int:
        """This process' part of the number of query heads, or of a multiple of it."""
        return whole * (self.queries[1] - self.queries[0]) // self.query_heads

    def of_keys(self, whole: int) -> int:
        """This process' part of the number of key-value heads, or of a multiple of it."""
        return whole * self.own_keys // self.key_heads


def group_of(block: nn.Module, family: Family) -> int | None:
    """Returns the number of query heads that share a key-value head in a block; None if no fact names it."""
    for path in family.groups:
        holder, _, key = path.rpartition(".")
        found = getattr(submodule(block, holder), key, None)
        if isinstance(found, int):
            return found
    return None


def share_heads(
    config: Any, processes: int, index: int, counts: tuple[str, str] = Region.head_counts, *, group: int | None = None
) -> HeadShare | None:
    """Returns a process' share of the heads; None if the heads cannot be distributed.

    Args:
        counts: keys of the numbers of query heads and of key-value heads.
        group: query heads that share a key-value head; by default as in the configuration.
    """
    query_heads = getattr(config, counts[0])
    group = group or query_heads // (getattr(config, counts[1], None) or query_heads)
    key_heads = query_heads // group
    if key_heads >= processes:
        keys = even_part(key_heads, processes, index)
        return HeadShare(query_heads, key_heads, (keys[0] * group, keys[1] * group), keys)
    if processes % key_heads or query_heads % processes:
        return None
    own = query_heads // processes
    key = index // (processes // key_heads)
    return HeadShare(query_heads, key_heads, (index * own, (index + 1) * own), (key, key + 1))
