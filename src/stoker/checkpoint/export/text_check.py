"""Compares an export's tokenizer, chat template and stop tokens with those of the training."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from stoker.checkpoint.export.gguf_vocabulary import SPACED, comparable, space_prefix
from stoker.checkpoint.export.reference_answers import ReferenceAnswers
from stoker.checkpoint.export.replay import TextAnswers
from stoker.errors import RunFailed


def check_texts(
    reference: ReferenceAnswers, got: TextAnswers, program: str, added: Sequence[int], *, skipped: Collection[str] = ()
) -> None:
    """Compares a program's tokens, their ids for some texts, and its template with those of the training.

    Args:
        added: numbers of characters that a program may omit before a conversation, as encoding adds them.
        skipped: texts that the program cannot encode as the run does.
    """
    wanted = reference.texts
    ours, theirs = json.loads(wanted.vocabulary), json.loads(got.vocabulary)
    for number, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            raise RunFailed(f"the export's tokenizer differs: token {number} is {b!r}, trained {a!r}")
    if len(theirs) < len(ours):
        raise RunFailed(f"the export's tokenizer differs: it has {len(theirs)} tokens, trained {len(ours)}")
    for text, a_ids, b_ids in zip(reference.request.texts, wanted.texts, got.texts, strict=True):
        if a_ids != b_ids and text not in skipped:
            raise RunFailed(
                f"the export tokenises differently in {program}: {text[:40]!r} gives {b_ids[:8]}, trained {a_ids[:8]}"
            )
    if got.template != wanted.template:
        raise RunFailed("the export's chat template is another than the training's")
    for a, b in zip(wanted.rendered, got.rendered, strict=True):
        if b not in [a[count:] for count in added]:
            raise RunFailed(
                f"the export's chat template gives another text in {program}: {b[:60]!r}, trained {a[:60]!r}"
            )


def check_stops(stop_ids: Sequence[int], folder: Path) -> None:
    """Compares the stop tokens of an exported folder."""
    wanted = set(stop_ids)
    stops = json.loads((folder / "generation_config.json").read_text("utf-8")).get("eos_token_id")
    if {stops} != wanted if isinstance(stops, int) else set(stops or ()) != wanted:
        raise RunFailed(f"the export stops differently: at {stops}, trained {sorted(wanted)}")


def check_gguf_stops(stop_ids: Sequence[int], file: Path) -> None:
    """Compares the stop tokens of a GGUF file, which may have more."""
    fields = _fields(file)
    named = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    stops = {field.contents() for field in named if field is not None}
    if not set(stop_ids) <= stops:
        raise RunFailed(f"the export stops differently: at {sorted(stops)}, trained {sorted(stop_ids)}")


def texts_of_gguf(file: Path, texts: list[list[int]], rendered: list[str]) -> TextAnswers:
    """Returns the file's own tokens and template, and a program's results for the texts and conversations."""
    fields = _fields(file)
    field = fields.get("tokenizer.chat_template")
    template = field.contents() if field else None
    if template is not None and template.startswith(SPACED):
        template = template.removeprefix(SPACED)
        if not all(text.startswith(" ") for text in rendered):
            raise RunFailed("the program that serves the export drops the space at the start of a conversation")
        rendered = [text[1:] for text in rendered]
    tokens = json.dumps(fields["tokenizer.ggml.tokens"].contents(), ensure_ascii=False)
    return TextAnswers(tokens, template, texts, rendered)


def left_out(file: Path, start: int) -> Sequence[int]:
    """Returns how many characters a program may omit at the start of a conversation, as encoding adds the start
    token.
    """
    adds = _fields(file).get("tokenizer.ggml.add_bos_token")
    return (0, start) if adds is not None and adds.contents() else (0,)


def differently_spaced(reference: ReferenceAnswers, file: Path) -> list[str]:
    """Returns the texts before which llama.cpp puts other spaces than the run's tokenizer; see `comparable`."""
    description = json.loads(reference.tokenizer)
    if not description["model"].get("byte_fallback"):
        return []
    prefix, special = space_prefix(description), [token["content"] for token in description["added_tokens"]]
    adds_space = _fields(file)["tokenizer.ggml.add_space_prefix"].contents()
    texts = reference.request.texts
    return [text for text in texts if not comparable(text, prefix, adds_space=adds_space, special=special)]


def _fields(file: Path) -> Any:
    from stoker.plan.shapes.gguf_reader import BoundedGGUFReader

    return BoundedGGUFReader(file).fields
