"""Sentencepiece's ``.model`` files (Kudo and Richardson, 2018): read as a tokenizer, and extended by more pieces."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from stoker.data.tokenizers.extend_tokenizer import LAST_RESORT
from stoker.data.tokenizers.token_bytes import SPACE
from stoker.errors import Problem, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FILE = "tokenizer.model"
CONVERTED = "tokenizer.json"
_UNIGRAM, _BPE = 1, 2  # of TrainerSpec.ModelType
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # of SentencePiece.Type


def _proto(path: Path) -> Any:
    """Returns the content of a ``.model`` file.

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
        raise UserError(Problem(f"this is not a sentencepiece model: {error}", file=str(path))) from error
    if not model.pieces:
        raise UserError(Problem("this is not a sentencepiece model: it has no pieces", file=str(path)))
    return model


@contextmanager
def as_folder(path: Path) -> Iterator[Path]:
    """A ``.model`` file as a temporary folder that transformers loads.

    Raises:
        UserError: its type is neither BPE nor Unigram.
    """
    proto = _proto(path)
    spec = proto.trainer_spec
    if spec.model_type not in (_BPE, _UNIGRAM) or spec.treat_whitespace_as_suffix:
        message = "only sentencepiece models of type BPE and Unigram, with spaces before words, can be extended"
        raise UserError(Problem(message, file=str(path)))
    config: dict[str, Any] = {"bos_token": spec.bos_piece if spec.bos_id >= 0 else None}
    config["eos_token"] = spec.eos_piece if spec.eos_id >= 0 else None
    with TemporaryDirectory(prefix="stoker-tokenizer-") as temporary:
        folder = Path(temporary)
        (folder / FILE).write_bytes(path.read_bytes())
        if spec.model_type == _BPE:
            config |= {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": spec.bos_id >= 0}
            config["add_prefix_space"] = proto.normalizer_spec.add_dummy_prefix
        else:
            config |= {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": spec.unk_piece}
            _unigram(proto).save(str(folder / CONVERTED))
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        yield folder


def _unigram(proto: Any) -> Tokenizer:
    """Returns a Unigram model as a `tokenizers.Tokenizer`; transformers converts BPE ones."""
    spec = proto.trainer_spec
    pieces = [(piece.piece, score) for piece, score in zip(proto.pieces, _scores(proto), strict=True)]
    tokenizer = Tokenizer(models.Unigram(pieces, spec.unk_id, spec.byte_fallback))
    tokenizer.normalizer = _normalizer(proto.normalizer_spec)
    if spec.split_by_whitespace:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
    tokenizer.decoder = _decoder(proto.normalizer_spec)
    named = [piece.piece for piece in proto.pieces if piece.type in (_UNKNOWN, _CONTROL)]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in named])
    return tokenizer


def _normalizer(rules: Any) -> normalizers.Normalizer:
    """Returns the changes that sentencepiece makes to a text, by its ``normalizer_spec``."""
    steps: list[normalizers.Normalizer] = []
    if rules.precompiled_charsmap:
        steps.append(normalizers.Precompiled(rules.precompiled_charsmap))
    if rules.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if rules.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def _decoder(rules: Any) -> decoders.Decoder:
    decoding = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if rules.add_dummy_prefix:
        decoding.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(decoding)


def bpe_by_segment(path: Path) -> Tokenizer:
    """Returns a BPE model that encodes each text between special tokens as sentencepiece does, on its own.

    Raises:
        UserError: it cannot be read, or is no such model.
    """
    rules = _proto(path).normalizer_spec
    with as_folder(path) as folder:
        tokenizer: Tokenizer = from_pieces(folder).backend_tokenizer
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer, tokenizer.decoder = _normalizer(rules), _decoder(rules)
    tokenizer.post_processor = None
    return tokenizer


def _scores(proto: Any) -> list[float]:
    """Returns the scores of a Unigram model's pieces; user-defined pieces win over all other segmentations."""
    best = max(piece.score for piece in proto.pieces if piece.type == _NORMAL)
    return [len(p.piece.encode()) * best - 0.1 if p.type == _USER_DEFINED else p.score for p in proto.pieces]


def write_extended(old: Path, tokens: Sequence[str], new: Path) -> None:
    """Writes a ``.model`` file with new pieces after the old ones, with scores below all old ones.

    Raises:
        UserError: the old file cannot be read.
    """
    proto = _proto(old)
    if proto.trainer_spec.model_type == _UNIGRAM:
        scores = [min(_scores(proto)) + LAST_RESORT] * len(tokens)
    else:  # the rank of a merge
        lowest = min(piece.score for piece in proto.pieces)
        scores = [lowest - number for number in range(1, len(tokens) + 1)]
    for token, score in zip(tokens, scores, strict=True):
        piece = proto.pieces.add()
        piece.piece, piece.score, piece.type = token, score, _NORMAL
    proto.trainer_spec.vocab_size = len(proto.pieces)
    new.write_bytes(proto.SerializeToString())


def pieces_in(path: Path) -> int:
    """Returns the number of pieces in a ``.model`` file."""
    return len(_proto(path).pieces)


def from_pieces(folder: Path) -> PreTrainedTokenizerFast:
    """Returns the tokenizer of a folder with a ``.model`` file, as transformers converts it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)  # type: ignore[return-value]
