"""The record of a tokenizer's extension: sufficient to make a model's new rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from stoker.errors import Problem, UserError
from stoker.job.blocks.model_block import ModelBlock

FILE = "extension.json"
ROLES = ("bos", "eos", "pad", "unk")
ROWS = 64  # embeddings are enlarged to multiples of this, which matrix units compute fastest (Shoeybi et al., 2019)


@dataclass(frozen=True)
class Extension:
    """New tokens behind those of another tokenizer.

    Attributes:
        extends: the name of the tokenizer that was extended.
        before, after: fingerprints of its vocabulary and of the extended one.
        first: the first new id.
        pieces: of each new token, in the order of ids, the old ids that it was cut into.
    """

    extends: str
    before: str
    after: str
    first: int
    pieces: tuple[tuple[int, ...], ...]

    @property
    def tokens(self) -> int:
        """Ids in all."""
        return self.first + len(self.pieces)

    def rows(self, have: int) -> int:
        """Returns the rows of the embedding for a model with ``have`` rows: unchanged if they suffice."""
        return rows_of(self.tokens, have)

    def write(self, folder: Path) -> None:
        """Writes the record into the tokenizer's folder."""
        (folder / FILE).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")


def read_extension(folder: Path) -> Extension | None:
    """Reads the extension in a tokenizer's folder; returns None if there is none.

    Raises:
        UserError: the file is damaged.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        pieces = tuple(tuple(map(int, cut)) for cut in content.pop("pieces"))
        found = Extension(pieces=pieces, **content)
        if not all(cut and max(cut) < found.first and min(cut) >= 0 for cut in pieces):
            raise ValueError("a new token consists of no old ones")
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"cannot be read: {error}"
        raise UserError(Problem(message, "write it again with `stoker tokenizer extend`", file=str(path))) from error
    return found


def special_tokens(block: ModelBlock) -> list[str]:
    """Returns all tokens of ``model.special_tokens``."""
    tokens = block.special_tokens
    if tokens is None:
        return []
    return [*tokens.additional, *filter(None, (getattr(tokens, role) for role in ROLES))]


def read_vocabulary(folder: Path) -> tuple[set[str], list[str]] | None:
    """Returns (all tokens, added special tokens) of a folder's ``tokenizer.json``; None if it cannot be read."""
    try:
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        added = [token["content"] for token in content["added_tokens"]]
        return {*added, *(each if isinstance(each, str) else each[0] for each in content["model"]["vocab"])}, added
    except (OSError, ValueError, KeyError, TypeError):
        return None


def rows_with_special_tokens(block: ModelBlock, have: int, base: Path) -> int:
    """Rows that the embedding of a job's model gets for the tokens of ``model.tokenizer`` and ``model.special_tokens``.

    A tokenizer that is in no local folder is taken to have a token for each of the model's rows.
    """
    folder = base / Path(block.tokenizer or block.name).expanduser()
    extension = read_extension(folder) if block.tokenizer else None
    known, _ = read_vocabulary(folder) or (set(), [])
    new = len(set(special_tokens(block)) - known)
    tokens = extension.tokens if extension else len(known) or have
    return rows_of(tokens + new, have) if new or extension else have


def rows_of(tokens: int, have: int) -> int:
    """Rows of an embedding of ``have`` rows once it has a row for each token."""
    return have if tokens <= have else -(-tokens // ROWS) * ROWS


def fingerprint(vocabulary: Mapping[str, int]) -> str:
    """Returns a digest of all tokens and their ids."""
    digest = hashlib.blake2b(digest_size=16)
    for token, number in sorted(vocabulary.items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{number} {token}\0".encode(errors="surrogatepass"))
    return digest.hexdigest()
