"""Sentencepiece's own ``.model`` files (Kudo and Richardson, 2018): read as a tokenizer, written with more pieces."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from stoker.errors import Problem, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FILE = "tokenizer.model"
_BPE = 2  # of TrainerSpec.ModelType
_NORMAL = 1  # of SentencePiece.Type


def _proto(path: Path) -> Any:
    """The content of a ``.model`` file.

    Raises:
        UserError: it cannot be read, or the package is not installed.
    """
    try:
        from google.protobuf.message import DecodeError
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        message = "a sentencepiece model needs the package sentencepiece"
        raise UserError(Problem(message, "pip install 'stoker[sentencepiece]'", file=str(path))) from error
    formats: Any = sentencepiece_model_pb2  # its names are made when it is loaded
    model = formats.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except (DecodeError, OSError) as error:
        raise UserError(Problem(f"this is no sentencepiece model: {error}", file=str(path))) from error
    if not model.pieces:
        raise UserError(Problem("this is no sentencepiece model: it holds no pieces", file=str(path)))
    return model


@contextmanager
def as_folder(path: Path) -> Iterator[Path]:
    """A ``.model`` file as a folder that transformers loads, while it is needed.

    Raises:
        UserError: it is no BPE model: Unigram models have no form of that kind in transformers.
    """
    proto = _proto(path)
    if proto.trainer_spec.model_type != _BPE:
        message = "only sentencepiece models of type BPE can be extended as a .model file"
        raise UserError(Problem(message, "give the folder with its tokenizer.json", file=str(path)))
    with TemporaryDirectory(prefix="stoker-tokenizer-") as temporary:
        folder = Path(temporary)
        (folder / FILE).write_bytes(path.read_bytes())
        spec = proto.trainer_spec
        config = {
            "tokenizer_class": "LlamaTokenizer",
            "legacy": False,
            "add_prefix_space": proto.normalizer_spec.add_dummy_prefix,
            "add_bos_token": spec.bos_id >= 0,
        }
        config["bos_token"] = spec.bos_piece if spec.bos_id >= 0 else None
        config["eos_token"] = spec.eos_piece if spec.eos_id >= 0 else None
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        yield folder


def write_extended(old: Path, tokens: Sequence[str], new: Path) -> None:
    """Writes a ``.model`` file with more pieces behind the old ones, whose scores lie below all old ones.

    Raises:
        UserError: the old one cannot be read, or holds other ids than the tokenizer beside it.
    """
    proto = _proto(old)
    lowest = min(piece.score for piece in proto.pieces)
    for number, token in enumerate(tokens, 1):
        piece = proto.pieces.add()
        piece.piece, piece.score, piece.type = token, lowest - number, _NORMAL
    proto.trainer_spec.vocab_size = len(proto.pieces)
    new.write_bytes(proto.SerializeToString())


def pieces_in(path: Path) -> int:
    """How many pieces a ``.model`` file holds."""
    return len(_proto(path).pieces)


def from_pieces(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a folder that holds a ``.model`` file, as transformers converts it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)  # type: ignore[return-value]
