"""Extends tokenizers, or trains them on a corpus, and saves them as folders that jobs and transformers load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from stoker.data.dropped_rows import DroppedRows
from stoker.data.files.byte_streams import utf8_advice
from stoker.data.files.compression import Compression, compression, split_at_lines, split_held_out
from stoker.data.files.tables import NOT_UTF8
from stoker.data.sources import Source, open_source
from stoker.data.tokenizers.extend_tokenizer import Extended, extend, refusal
from stoker.data.tokenizers.train_tokenizer import Kind, learn_from_texts, texts_of
from stoker.errors import Problem, RunFailed, UserError
from stoker.files import unwritable
from stoker.job.blocks.source_block import SourceBlock
from stoker.job.tokenizer_extension import FILE, Extension, fingerprint
from stoker.models.model_source import ModelSource, find_model, path_of
from stoker.models.tokenizers.job_tokenizer import load_tokenizer_from, with_special_tokens
from stoker.models.tokenizers.sentencepiece_model import CONVERTED, as_folder, from_pieces, pieces_in, write_extended
from stoker.models.tokenizers.sentencepiece_model import FILE as PIECES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LEARNT_FROM = 16 << 20  # characters of each source; encoding needs 30 bytes of memory for each


@dataclass(frozen=True)
class Made:
    """A tokenizer in its folder.

    Attributes:
        tokens: number of ids.
        new: number of added ids; 0 for a tokenizer trained from scratch.
        scripts: scripts of the letters in the new tokens.
        measured: compression of each held-out text.
    """

    folder: Path
    tokens: int
    new: int
    scripts: tuple[str, ...]
    measured: tuple[Compression, ...]


@dataclass(frozen=True)
class CorpusTexts:
    """The texts to learn from, the held-out ones by name, and the rows that give no text."""

    learnt: list[str]
    held_out: dict[str, list[str]]
    dropped: DroppedRows


def read_texts(corpus: Sequence[str], held_out: Sequence[str], base: Path) -> CorpusTexts:
    """Reads the texts of sources; without a held-out source, a part of the corpus is held out.

    Raises:
        UserError: a source cannot be read, or contains no text or a single line.
    """
    dropped = DroppedRows()
    named = {name: _read(name, base, dropped) for name in held_out}
    texts = [text for name in corpus for text in _read(name, base, dropped)]
    if named:
        return CorpusTexts(texts, named, dropped)
    learnt, apart = split_held_out(texts if len(texts) > 1 else texts[0].splitlines(keepends=True))
    if not apart:
        message = "the corpus is a single line, so nothing of it can be held out to measure on"
        raise UserError(Problem(message, "give more text, or --held-out"))
    return CorpusTexts(learnt, {"held out": apart}, dropped)


def _read(name: str, base: Path, dropped: DroppedRows) -> list[str]:
    """Reads the texts of a source, and adds its broken rows to ``dropped``."""
    from stoker.data.sources import source_problem

    block = SourceBlock(path=name)
    found = source_problem(block, base)
    if found:
        raise UserError(Problem(*found))
    source, broken = open_source(block, base), DroppedRows()
    texts = [part for part in split_at_lines(texts_of(source, block, LEARNT_FROM, broken)) if part]
    if not texts:
        raise UserError(_without_text(source, broken))
    dropped.join(broken)
    return texts


def _without_text(source: Source, broken: DroppedRows) -> Problem:
    advice = "give documents or conversations"
    if not broken.first:
        return Problem(f"{source.name} holds no text", advice)
    most = ", ".join(f"{reason} ({count})" for reason, count in broken.reasons.most_common(3))
    file = next((file for file in source.files if str(file) == broken.first[0].source), None)
    if file is not None and NOT_UTF8 in broken.reasons:
        advice = utf8_advice(file)
    return Problem(f"{source.name} has no row that can be read: {most}", advice)


def check_target(folder: Path) -> None:
    """Raises: UserError: the folder exists already and is not empty, or is one that cannot be made or replaced."""
    if folder.name in ("", ".."):
        raise UserError(
            Problem(f"-o {folder}: the tokenizer's folder needs a name", "give a new folder, such as -o mine")
        )
    if what := unwritable(folder.absolute().parent):
        raise UserError(Problem(f"-o {folder}: {folder.parent} {what}", "give another -o"))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(Problem(f"{folder} exists already", "give another folder with -o, or remove it"))


def extend_tokenizer(name: str, texts: CorpusTexts, size: int, folder: Path, base: Path) -> Made:
    """Adds up to ``size`` tokens to a tokenizer and writes it into a folder, with the record for a model's new rows.

    Args:
        name: a model, a folder with a tokenizer, or a sentencepiece ``.model`` file.

    Raises:
        UserError: there is no such tokenizer, or it cannot be extended.
    """
    path = path_of(name, base)
    if path.suffix == ".model" and path.is_file():
        with as_folder(path) as opened:
            return _extend(name, from_pieces(opened), opened / PIECES, texts, size, folder)
    source = find_model(name, base)
    if source is None and any((path / file).is_file() for file in (CONVERTED, PIECES)):
        source = ModelSource("folder", str(path))
    if source is None or source.kind == "scratch":
        what = "is learned from the data of its job" if source else "is not there"
        message = f"--from {name}: this tokenizer {what}"
        raise UserError(Problem(message, "give a model, a folder that holds tokenizer.json, or a .model file"))
    return _extend(name, load_tokenizer_from(source), None, texts, size, folder)


def _extend(
    name: str, old: PreTrainedTokenizerFast, pieces: Path | None, texts: CorpusTexts, size: int, folder: Path
) -> Made:
    before = Tokenizer.from_str(old.backend_tokenizer.to_str())
    why = refusal(json.loads(before.to_str()))
    if why:
        raise UserError(Problem(f"--from {name}: this tokenizer cannot be extended: {why}"))
    extended = extend(before.to_str(), texts.learnt, size)
    if not extended.tokens:
        message = f"--corpus: no pair of tokens occurs twice in its letters ({', '.join(extended.scripts)})"
        raise UserError(Problem(message, "give more text"))
    vocabulary = before.get_vocab(with_added_tokens=True)

    def write(place: Path) -> Tokenizer:
        old.save_pretrained(place)
        (place / FILE).unlink(missing_ok=True)
        _put(place, extended, pieces)
        after = load_tokenizer_from(ModelSource("folder", str(place))).backend_tokenizer
        found = after.get_vocab(with_added_tokens=True)
        moved = [token for token, number in vocabulary.items() if found.get(token) != number]
        wanted = {token: extended.first + i for i, token in enumerate(extended.tokens)}
        if moved or any(found.get(token) != number for token, number in wanted.items()):
            raise RunFailed(f"{name}: transformers gives other ids to the extended tokenizer than were written")
        record = Extension(name, fingerprint(vocabulary), fingerprint(found), extended.first, extended.pieces)
        record.write(place)
        return after

    return _written(folder, write, texts, before=before, made=extended)


def _put(place: Path, extended: Extended, pieces: Path | None) -> None:
    """Puts new tokens into the files of the saved old tokenizer."""
    beside = pieces or place / PIECES
    if beside.is_file() and pieces_in(beside) == extended.first:
        write_extended(beside, extended.tokens, place / PIECES)
    else:
        (place / PIECES).unlink(missing_ok=True)
    if pieces is None or (pieces.parent / CONVERTED).is_file():
        (place / CONVERTED).write_text(extended.definition, encoding="utf-8")
        return
    # Training and serving both use transformers' conversion of the new file.
    with TemporaryDirectory(prefix="stoker-tokenizer-") as temporary:
        shutil.copytree(place, temporary, dirs_exist_ok=True)
        (Path(temporary) / CONVERTED).unlink()
        from_pieces(Path(temporary)).save_pretrained(place)


def train_tokenizer(texts: CorpusTexts, size: int, folder: Path, kind: Kind = "bpe") -> Made:
    """Trains a tokenizer of up to ``size`` ids on texts and writes it into a folder."""

    def write(place: Path) -> Tokenizer:
        with_special_tokens(learn_from_texts(texts.learnt, size, kind)).save_pretrained(place)
        return load_tokenizer_from(ModelSource("folder", str(place))).backend_tokenizer

    return _written(folder, write, texts)


def _written(
    folder: Path,
    write: Callable[[Path], Tokenizer],
    texts: CorpusTexts,
    *,
    before: Tokenizer | None = None,
    made: Extended | None = None,
) -> Made:
    """Writes into a temporary folder, measures, and renames it."""
    check_target(folder)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        tokenizer = write(partial)
        first = made.first if made else 0
        measured = [compression(n, t, tokenizer, earlier=before, first=first) for n, t in texts.held_out.items()]
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    except OSError as error:
        raise RunFailed(f"the tokenizer could not be written to {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    tokens = tokenizer.get_vocab_size(with_added_tokens=True)
    new, scripts = (len(made.tokens), made.scripts) if made else (0, ())
    return Made(folder, tokens, new, scripts, tuple(measured))
