"""A job's special tokens: in its tokenizer, as stop tokens, and as new rows of its model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from stoker.errors import Problem, UserError, did_you_mean
from stoker.job.blocks.model_block import ModelBlock
from stoker.job.tokenizer_extension import ROLES, Extension, fingerprint, special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def add_special_tokens(tokenizer: PreTrainedTokenizerFast, block: ModelBlock) -> None:
    """Adds ``model.special_tokens`` to a tokenizer and makes the first of ``model.stop`` its end token.

    Raises:
        UserError: a stop token is not in the vocabulary.
    """
    from tokenizers import AddedToken

    def special(token: str) -> AddedToken:
        return AddedToken(token, special=True, normalized=False)

    tokens = block.special_tokens
    if tokens is not None:
        tokenizer.add_tokens([special(token) for token in tokens.additional], special_tokens=True)
        roles = {f"{role}_token": token for role in ROLES if (token := getattr(tokens, role)) is not None}
        tokenizer.add_special_tokens({role: special(token) for role, token in roles.items()})
    known = [token.content for token in tokenizer.added_tokens_decoder.values()]
    if problems := unknown_stops(block, tokenizer.get_vocab(), known):
        raise UserError(*problems)
    if stops := stop_tokens(block):
        tokenizer.add_tokens([special(token) for token in stops], special_tokens=True)
        tokenizer.add_special_tokens({"eos_token": special(stops[0])})


def stop_tokens(block: ModelBlock) -> list[str]:
    """Returns the stop tokens that the job names; empty if it uses the model's."""
    if block.stop is not None:
        return [block.stop] if isinstance(block.stop, str) else block.stop
    eos = block.special_tokens.eos if block.special_tokens is not None else None
    return [] if eos is None else [eos]


def unknown_stops(block: ModelBlock, vocabulary: Collection[str], special: Sequence[str]) -> list[Problem]:
    """Returns the stop tokens that are neither in the vocabulary nor added to it."""
    added = special_tokens(block)
    problems = []
    for stop in stop_tokens(block):
        if stop in vocabulary or stop in added:
            continue
        near = did_you_mean(stop, [*special, *added], 0.4)
        known = near or f"its special tokens are {', '.join(special[:8]) or 'none'};"
        hint = f"{known} a new token is added by `model.special_tokens: [{stop!r}]`"
        problems.append(Problem(f"`model.stop`: {stop!r} is not a token of the vocabulary", hint, key="model.stop"))
    return problems


def with_new_tokens(
    tokenizer: PreTrainedTokenizerFast, block: ModelBlock, extension: Extension | None
) -> Extension | None:
    """Returns the tokenizer's extension together with the job's special tokens, which are added to the tokenizer."""
    known = tokenizer.get_vocab()
    backend = tokenizer.backend_tokenizer
    names = [*stop_tokens(block), *special_tokens(block)]
    nothing = next((i for i in (tokenizer.unk_token_id, tokenizer.eos_token_id) if i is not None), 0)
    cuts = {name: backend.encode(name, add_special_tokens=False).ids or [nothing] for name in names}
    add_special_tokens(tokenizer, block)
    after = tokenizer.get_vocab()
    new = sorted((number, token) for token, number in after.items() if token not in known)
    if not new:
        return extension
    first, old = (extension.first, extension.pieces) if extension else (new[0][0], ())
    # The pieces of a new token are old tokens, even where it is tokenised into other new ones.
    pieces = tuple(
        tuple(piece for number in cuts[token] for piece in (old[number - first] if number >= first else (number,)))
        for _, token in new
    )
    extends, before = (extension.extends, extension.before) if extension else (block.name, fingerprint(known))
    return Extension(extends, before, fingerprint(after), first, (*old, *pieces))
