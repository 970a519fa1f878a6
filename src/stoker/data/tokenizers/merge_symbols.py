"""The symbols that merges are learnt over: tokens of an encoding, numbered in order of appearance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from stoker.data.tokenizers.bpe_merges import Merge, Symbol
from stoker.data.tokenizers.token_bytes import Kind, byte_of, bytes_of, ids_of
from stoker.data.tokenizers.wordpiece import inside_of, pieces_of, unknown_of


class Numbered:
    """Tokens of runs as symbols, numbered in order of appearance; characters written as bytes are symbols too."""

    def __init__(self, content: dict[str, Any], kind: Kind) -> None:
        self._kind = kind
        self._texts = {number: token for token, number in ids_of(content).items()}
        self._numbers: dict[int | str, int] = {}
        self._ids = ids_of(content)
        self._inside, self._unknown = inside_of(content["model"]), unknown_of(content["model"])
        self.symbols: list[Symbol] = []
        self.pieces: list[tuple[int, ...]] = []
        """The old ids of each symbol."""

    def run(self, run: bytes) -> list[int]:
        """Returns the symbols of a run."""
        numbers: list[int] = []
        waiting = b""
        for token_id in np.frombuffer(run, dtype=np.int64).tolist():
            number = self._numbers.get(token_id)
            if number is not None:
                numbers.append(number)
                continue
            byte = byte_of(self._texts[token_id]) if self._kind == "fallback" else None
            if byte is None:
                numbers.append(self._token(token_id))
                continue
            waiting += bytes((byte,))
            try:
                character = waiting.decode()
            except UnicodeDecodeError:
                continue
            numbers.append(self._character(character))
            waiting = b""
        return numbers

    def learn(self, pieces: Sequence[str]) -> None:
        """Adds pieces that have no token yet."""
        for piece in pieces:
            self._add(piece, Symbol(piece), (self._unknown or 0,))

    def word(self, word: str) -> list[int]:
        """Returns the symbols of a word that has no tokens: its characters."""
        numbers = []
        for piece in pieces_of(word, self._inside):
            token_id = self._ids.get(piece)
            number = self._numbers.get(piece if token_id is None else token_id)
            if number is None and token_id is not None:
                number = self._token(token_id)
            if number is None:
                number = self._add(piece, Symbol(piece, unknown=True), (self._unknown or 0,))
            numbers.append(number)
        return numbers

    def _token(self, token_id: int) -> int:
        text = self._texts[token_id]
        content = bytes_of(text.removeprefix(self._inside), self._kind)
        starts = [i for i, byte in enumerate(content) if byte & 0xC0 != 0x80]
        inherited = starts[0] if starts else len(content)
        missing = _length(content[starts[-1]]) - (len(content) - starts[-1]) if starts else 0
        return self._add(token_id, Symbol(text, len(starts), inherited, missing), (token_id,))

    def _character(self, character: str) -> int:
        number = self._numbers.get(character)
        if number is not None:
            return number
        cut = tuple(self._ids[f"<0x{byte:02X}>"] for byte in character.encode())
        return self._add(character, Symbol(character, unknown=True), cut)

    def _add(self, key: int | str, symbol: Symbol, cut: tuple[int, ...]) -> int:
        self._numbers[key] = len(self.symbols)
        self.symbols.append(symbol)
        self.pieces.append(cut)
        return self._numbers[key]


def _length(lead: int) -> int:
    """Returns the length in bytes of the UTF-8 character that this byte begins."""
    return 1 if lead < 0x80 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4


def old_ids(merges: Sequence[Merge], numbered: Numbered) -> Iterator[tuple[int, ...]]:
    """Yields the old ids that the token of each merge consists of."""
    cuts = list(numbered.pieces)
    for merge in merges:
        cuts.append(cuts[merge.left] + (cuts[merge.right] if merge.right is not None else ()))
        yield cuts[-1]
