"""GGUF files, read in memory and time that are in proportion to the file."""

from __future__ import annotations

from typing import Any

from gguf import GGUFReader

from stoker.plan.shapes.most_layers import most_layers

MOST_PARTS = 8_000_000  # numbers, lengths and strings of a header; vocabularies of 256,000 tokens have 2 million


class BoundedGGUFReader(GGUFReader):
    """The package's reader, whose lengths it takes from the file as they are.

    Raises:
        ValueError: a length in the file goes beyond its end, the header has too many parts, or more layers than
            the tensors.
    """

    _parts = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        most = most_layers(tensor.name for tensor in self.tensors)
        for name, field in self.fields.items():
            if name.endswith(".block_count") and field.contents() > most:
                raise ValueError(f"{name} is {field.contents():,}, and its tensors have at most {most:,} layers")

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        self._parts += 1
        found = super()._get(offset, dtype, count, override_order)
        if len(found) != count:
            raise ValueError("the file ends too early")
        if self._parts > MOST_PARTS:
            raise ValueError(f"it has more than {MOST_PARTS:,} parts")
        return found
