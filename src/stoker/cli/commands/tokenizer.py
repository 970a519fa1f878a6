"""Add tokens to a tokenizer for a corpus, keeping all existing ids; or train a tokenizer from the corpus."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.errors import Problem, UserError

KINDS = ("bpe", "wordpiece", "unigram")

if TYPE_CHECKING:
    from stoker.data.dropped_rows import DroppedRows
    from stoker.data.files.compression import Compression
    from stoker.data.tokenizers.train_tokenizer import Kind
    from stoker.models.tokenizers.save_tokenizer import Made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``stoker tokenizer``."""
    parser.add_argument(
        "what",
        choices=("extend", "train"),
        help="extend: add tokens to an existing tokenizer, for scripts that it splits poorly; train: train a new "
        "byte-level tokenizer",
    )
    parser.add_argument("--kind", choices=KINDS, help="train: algorithm (default: bpe)")
    parser.add_argument(
        "--from",
        dest="start",
        metavar="TOKENIZER",
        help="tokenizer to extend: a model (catalogue name, hub id, .gguf), a folder, or a sentencepiece .model file",
    )
    parser.add_argument(
        "--corpus",
        nargs="+",
        action="extend",
        required=True,
        metavar="FILE",
        help="training texts: files, folders or catalogue names, as in a job's `data`",
    )
    parser.add_argument(
        "--size",
        type=int,
        required=True,
        metavar="N",
        help="extend: number of tokens to add; train: vocabulary size",
    )
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="output folder")
    parser.add_argument(
        "--held-out",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="texts to measure compression on (default: 5%% of the corpus, excluded from training)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else")


def run(arguments: argparse.Namespace) -> int:
    """Learns, writes, measures and prints."""
    if arguments.size < 1:
        raise UserError(Problem(f"--size {arguments.size}: give at least 1"))
    if arguments.what == "extend" and arguments.start is None:
        raise UserError(Problem("--from is missing: it gives the tokenizer to extend", "write --from MODEL"))
    if arguments.what == "train" and arguments.start is not None:
        raise UserError(Problem("--from is not used by `train`", "write `stoker tokenizer extend`, or no --from"))
    if arguments.what == "extend" and arguments.kind is not None:
        message = "--kind: `extend` keeps the kind of the tokenizer"
        raise UserError(Problem(message, "leave it out, or write `stoker tokenizer train`"))
    from stoker.cli.output.quiet_libraries import quiet_libraries

    quiet_libraries()
    from stoker.data.tokenizers.train_tokenizer import FEWEST
    from stoker.models.tokenizers.save_tokenizer import check_target, extend_tokenizer, read_texts, train_tokenizer

    kind: Kind = arguments.kind or "bpe"
    fewest = FEWEST[kind]
    if arguments.what == "train" and arguments.size < fewest:
        raise UserError(Problem(f"--size {arguments.size}: {kind} over bytes has at least {fewest} tokens"))
    base, folder = Path.cwd(), Path(arguments.output)
    check_target(folder)
    texts = read_texts(arguments.corpus, arguments.held_out, base)
    if arguments.what == "extend":
        made = extend_tokenizer(arguments.start, texts, arguments.size, folder, base)
    else:
        made = train_tokenizer(texts, arguments.size, folder, kind)
    if arguments.json:
        print(json.dumps(_answer(made, texts.dropped), ensure_ascii=False))
    else:
        _print(arguments, made, texts.dropped)
    return 0


def _answer(made: Made, dropped: DroppedRows) -> dict[str, Any]:
    return {
        "folder": str(made.folder),
        "tokens": made.tokens,
        "new_tokens": made.new,
        "scripts": made.scripts,
        "rows_dropped": dropped.reasons.total(),
        "reasons": dropped.reasons,
        "held_out": [measured.as_json() for measured in made.measured],
    }


def _print(arguments: argparse.Namespace, made: Made, dropped: DroppedRows) -> None:
    from stoker.cli.output.data_view import print_dropped

    if made.new:
        print(
            f"{made.new:,} new tokens of {made.tokens:,}, learned for {', '.join(made.scripts)}; old ids are unchanged"
        )
    else:
        print(f"{made.tokens:,} tokens")
    if made.new < arguments.size and arguments.what == "extend":
        print(f"fewer than the {arguments.size:,} requested: no further pair of tokens occurs twice in the corpus")
    elif made.tokens < arguments.size and arguments.what == "train":
        print(f"fewer than the {arguments.size:,} requested: the corpus supports no more")
    for measured in made.measured:
        print(_line(measured))
    print_dropped(dropped.reasons, dropped.first)
    print(f"written to {made.folder}; in a job: model: {{name: ..., tokenizer: {made.folder}}}")


def _line(measured: Compression) -> str:
    per_token = measured.characters / max(1, measured.after)
    text = f"{measured.name}: {measured.texts:,} texts, {measured.characters:,} characters: "
    if measured.before is None:
        text += f"{measured.after:,} tokens, {per_token:.2f} characters per token"
    else:
        before = measured.characters / max(1, measured.before)
        change = f"{-measured.fewer:+.1%}" if measured.fewer else "unchanged"
        text += f"{measured.before:,} -> {measured.after:,} tokens ({change}), "
        text += f"{before:.2f} -> {per_token:.2f} characters per token; {measured.same:,} texts with the same ids; "
        text += f"{measured.used:,} new tokens used"
    lost = measured.texts - measured.restored
    return text + (f"; {lost:,} NOT DECODED WITHOUT LOSS" if lost else "; all are decoded without loss")
