"""Tokenizer of a GGUF file: tokens, types, merges or scores, special ids, and the name of its splitting rules.

llama.cpp identifies the splitting rules (the pre-tokenizer) of byte-level BPE by name only. A tokenizer whose rules
equal none of `stoker.models.pre_tokenizers` is rejected: a wrong name would load without an error and split text
differently. BPE with byte fallback is written as a sentencepiece vocabulary, which has no such rules.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from jinja2 import TemplateError

from stoker.checkpoint.export.gguf_vocabulary import (
    SPACED,
    Unsupported,
    skips_blanks,
    space_prefix,
    token_list,
    with_pieces,
)
from stoker.errors import Problem, UserError
from stoker.models.pre_tokenizers import DIGITS, GPT2, PRE_TOKENIZERS

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from transformers import PreTrainedTokenizerFast


class _SpecialIds(NamedTuple):
    """Special ids, and at most two more that end a generation.

    Without a bos llama.cpp assumes token 11, so a tokenizer without one gets its eos, which is then not added.
    """

    bos: int
    eos: int
    more_stops: tuple[int, ...]
    pad: int | None
    unk: int | None


@dataclass(frozen=True)
class GgufTokenizer:
    """A tokenizer in GGUF's terms.

    Attributes:
        model: ``gpt2`` (byte-level BPE) or ``llama`` (sentencepiece).
        pre: name of the splitting rules, as in `PRE_TOKENIZERS`; ``default`` of sentencepiece.
        tokens: by id, for the model's whole vocabulary; ids without a token get ``[PADn]``.
        types: by id, as ``gguf.TokenType``.
        merges: in order of rank, each ``left right``; none of sentencepiece.
        scores: by id; none of byte-level BPE.
        adds_space: whether a space is put before each text between special tokens.
        skips_blanks: whether blanks after special tokens are skipped.
        add_bos, add_eos: whether encoding adds these tokens.
        chat_templates: by name.
    """

    model: Literal["gpt2", "llama"]
    pre: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...]
    scores: tuple[float, ...]
    adds_space: bool
    skips_blanks: bool
    special: _SpecialIds
    add_bos: bool
    add_eos: bool
    chat_templates: dict[str, str]

    def model_name(self, name: str) -> str:
        """Returns a name for ``general.name``; llama.cpp skips blanks after special tokens by ``phi-3`` in it."""
        plain = re.sub("phi-?3", "Phi_3", name, flags=re.IGNORECASE)
        return f"Phi-3 {plain}" if self.skips_blanks else plain

    def write(self, writer: GGUFWriter) -> None:
        """Adds the ``tokenizer.*`` keys to a GGUF that is being written."""
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(list(self.tokens))
        writer.add_token_types(list(self.types))
        if self.model == "gpt2":
            writer.add_token_merges(list(self.merges))
        else:
            writer.add_token_scores(list(self.scores))
        special = self.special
        writer.add_bos_token_id(special.bos)
        writer.add_eos_token_id(special.eos)
        slots = (writer.add_eot_token_id, writer.add_eom_token_id)
        # Without an end-of-turn token, llama.cpp would guess one from the names of the tokens.
        for add_stop, stop in zip(slots, special.more_stops or (special.eos,), strict=False):
            add_stop(stop)
        if special.pad is not None:
            writer.add_pad_token_id(special.pad)
        if special.unk is not None:
            writer.add_unk_token_id(special.unk)
        writer.add_add_bos_token(self.add_bos)
        writer.add_add_eos_token(self.add_eos)
        writer.add_add_space_prefix(self.adds_space)
        if self.chat_templates:
            writer.add_chat_template([{"name": n, "template": t} for n, t in self.chat_templates.items()])


def gguf_tokenizer(
    tokenizer: PreTrainedTokenizerFast, *, vocab_size: int, stops: Collection[int], chat: bool
) -> GgufTokenizer:
    """Converts a tokenizer and the tokens that end an answer.

    Args:
        vocab_size: rows of the model's embedding.
        chat: whether the model was trained on conversations by the chat template, and not on plain text.

    Raises:
        UserError: GGUF cannot express the tokenizer, or the package is missing.
    """
    if importlib.util.find_spec("gguf") is None:
        raise UserError("writing GGUF needs the gguf package; pip install 'stoker[gguf]'")
    try:
        return _express(tokenizer, vocab_size=vocab_size, stops=sorted(stops), chat=chat)
    except Unsupported as reason:
        raise UserError(Problem(str(reason), "export as merged instead")) from None


def _express(tokenizer: Any, *, vocab_size: int, stops: list[int], chat: bool) -> GgufTokenizer:
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    if max(vocabulary) >= vocab_size:
        raise Unsupported(f"token id {max(vocabulary)} lies beyond the model's {vocab_size} embeddings")
    model = description["model"]
    _check_model(model)
    special = _special_ids(tokenizer, stops)
    before, after = _added_around(tokenizer)
    if before not in ([], [special.bos]) or after not in ([], [special.eos]):
        raise Unsupported("encoding adds more than the bos token before and the eos token after the text")
    tokens, types = token_list(vocabulary, tokenizer.added_tokens_decoder, vocab_size)
    templates = tokenizer.chat_template or {}
    merges, scores, adds_space = tuple[str, ...](), tuple[float, ...](), False
    if model["byte_fallback"]:
        types, scores = with_pieces(model, tokens, types)
        prefix = space_prefix(description)
        adds_space = prefix in ("each", "always")
        if prefix == "first":
            adds_space = not (chat and isinstance(templates, str))
            templates = templates if adds_space else _spaced_template(tokenizer)
    else:
        _check_normalizer(description["normalizer"])
        merges = tuple(_merge(m) for m in model["merges"])
    return GgufTokenizer(
        model="llama" if model["byte_fallback"] else "gpt2",
        pre="default" if model["byte_fallback"] else pre_tokenizer_name(description),
        tokens=tokens,
        types=types,
        merges=merges,
        scores=scores,
        adds_space=adds_space,
        skips_blanks=skips_blanks(tokenizer.added_tokens_decoder),
        special=special,
        add_bos=bool(before),
        add_eos=bool(after),
        chat_templates={"default": templates} if isinstance(templates, str) else dict(templates),
    )


def pre_tokenizer_name(description: dict[str, Any]) -> str:
    """Returns the ``tokenizer.ggml.pre`` whose rules equal those of a ``tokenizer.json``.

    Raises:
        Unsupported: no known pre-tokenizer has these rules.
    """
    rules = tuple(_splitting_rules(description["pre_tokenizer"]))
    ignore_merges = bool(description["model"].get("ignore_merges"))
    name = PRE_TOKENIZERS.get((rules, ignore_merges))
    if name is None:
        shown = ", then ".join(repr(rule) for rule in rules) or "no rule"
        raise Unsupported(f"llama.cpp has no known pre-tokenizer that splits by {shown} ({ignore_merges=})")
    return name


def _splitting_rules(pre_tokenizer: dict[str, Any] | None) -> list[str]:
    """Returns the regular expressions by which a pre-tokenizer splits, in order."""
    if pre_tokenizer is None:
        raise Unsupported("the tokenizer is not byte-level")
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    if not steps or steps[-1]["type"] != "ByteLevel":
        raise Unsupported("the tokenizer is not byte-level")
    rules = []
    for position, step in enumerate(steps, start=1):
        match step:
            case {"type": "ByteLevel", "add_prefix_space": False} if position == len(steps):
                rules += [GPT2] if step["use_regex"] else []
            case {"type": "Digits", "individual_digits": True}:
                rules.append(DIGITS)
            case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
                rules.append(pattern)
            case _:
                raise Unsupported(f"llama.cpp has no pre-tokenizer with the step {json.dumps(step)}")
    return rules


def _check_model(model: dict[str, Any]) -> None:
    if model["type"] != "BPE":
        raise Unsupported(f"the tokenizer is {model['type']}, not BPE")
    refused = ["continuing_subword_prefix", "end_of_word_suffix", "dropout"]
    for key in [*refused, "ignore_merges"] if model["byte_fallback"] else refused:
        if model.get(key):
            raise Unsupported(f"{key} = {model[key]!r} of the tokenizer's model cannot be expressed")


def _check_normalizer(normalizer: dict[str, Any] | None) -> None:
    # llama.cpp has no normaliser. NFC (Qwen) is accepted, as in all published GGUFs of these models: it changes only
    # text that is not in NFC.
    if normalizer and normalizer["type"] != "NFC":
        raise Unsupported(f"the tokenizer's normalizer {normalizer['type']} cannot be expressed")


def _spaced_template(tokenizer: Any) -> str:
    """Returns the chat template, with a space before texts that begin with no special token."""
    template = str(tokenizer.chat_template)
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    except TemplateError:  # it wants other roles
        return SPACED + template
    special = tuple(token.content for token in tokenizer.added_tokens_decoder.values())
    return template if text.startswith((" ", *special)) else SPACED + template


def _merge(merge: str | list[str]) -> str:
    text = merge if isinstance(merge, str) else " ".join(merge)
    if text.count(" ") != 1:
        raise Unsupported(f"the merge {merge!r} has a space inside a token")
    return text


def _special_ids(tokenizer: Any, stops: list[int]) -> _SpecialIds:
    eos = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else next(iter(stops), None)
    if eos is None:
        raise Unsupported("the tokenizer has no eos token: llama.cpp would take token 11 for it")
    more = tuple(dict.fromkeys(stop for stop in stops if stop != eos))
    if len(more) > 2:
        raise Unsupported(f"{len(more) + 1} stop tokens are more than the three a GGUF can name")
    bos = eos if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return _SpecialIds(bos, eos, more, tokenizer.pad_token_id, tokenizer.unk_token_id)


def _added_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Returns the ids that encoding adds before and after a text."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    dressed = tokenizer("a")["input_ids"]
    starts = [i for i in range(len(dressed) - len(bare) + 1) if dressed[i : i + len(bare)] == bare]
    if not bare or not starts:
        raise Unsupported("encoding with special tokens changes the tokens of the text itself")
    return dressed[: starts[0]], dressed[starts[0] + len(bare) :]
