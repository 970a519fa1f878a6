"""The tokenizers of ChatGLM2, ChatGLM3 and GLM-4 in their first format, as fast ones."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.errors import UserError, user_file_errors
from stoker.models.tokenizers.sentencepiece_model import FILE, bpe_by_segment

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

OWN_CODE = "tokenization_chatglm.py"
MARKS = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop")
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
TURNS = (
    "[gMASK]{sop}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n{space}' + message['content'] }}"
    "{% if loop.last and message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ROUNDS = (  # of ChatGLM2; an answer begins with a space, as it is tokenised on its own
    "[gMASK]sop{% set seen = namespace(rounds=0) %}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{% set seen.rounds = seen.rounds + 1 %}"
    "{{ '[Round ' ~ seen.rounds ~ ']\n\n问：' ~ message['content'] ~ '\n\n答：' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] }}"
    "{{ eos_token if loop.last else '\n\n' }}"
    "{% else %}{{ message['content'] + '\n\n' }}{% endif %}{% endfor %}"
)


def chatglm_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Returns the tokenizer of a checkpoint as a fast one."""
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    file = folder / FILE
    with user_file_errors(f"{folder / 'tokenizer_config.json'}"):
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    ranks = _ranks(file)
    with user_file_errors(f"the tokenizer {file}"):
        tokenizer, template = _glm4(ranks, settings) if ranks else _chatglm(folder)
    vocabulary = tokenizer.get_vocab()
    sop = "<sop>" if "<sop>" in vocabulary else "sop"
    tokenizer.post_processor = TemplateProcessing(
        f"[gMASK] {sop} $A", special_tokens=[(token, vocabulary[token]) for token in ("[gMASK]", sop)]
    )
    own = settings.get("chat_template")
    end, padding = ("<|endoftext|>",) * 2 if ranks else ("</s>", "<unk>")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end,
        pad_token=padding,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=own if isinstance(own, str) else template,
    )


def _ranks(file: Path) -> dict[bytes, int]:
    """Returns the tokens of a tiktoken file with their ranks; none if it is another file."""
    try:
        lines = [line.split() for line in file.read_bytes().splitlines()]
        return {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (ValueError, binascii.Error):
        return {}


def _glm4(ranks: dict[bytes, int], settings: Mapping[str, Any]) -> tuple[Tokenizer, str]:
    from tokenizers import AddedToken
    from transformers.convert_slow_tokenizer import TikTokenConverter

    class Converter(TikTokenConverter):
        @staticmethod
        def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
            return ranks

    tokenizer: Tokenizer = Converter("").converted()
    added = sorted((int(number), token) for number, token in settings["added_tokens_decoder"].items())
    for number, token in added:
        tokenizer.add_special_tokens([AddedToken(token["content"], normalized=False, special=True)])
        if tokenizer.token_to_id(token["content"]) != number:
            raise UserError(f"the token {token['content']} has the id {number}, which does not follow the one before")
    return tokenizer, TURNS.replace("{sop}", "<sop>").replace("{space}", "")


def _chatglm(folder: Path) -> tuple[Tokenizer, str]:
    from tokenizers import AddedToken

    tokenizer = bpe_by_segment(folder / FILE)
    own = folder / OWN_CODE  # its code names the tokens of roles, which ChatGLM2 has not
    roles = ROLES if not own.is_file() or ROLES[2] in own.read_text(encoding="utf-8") else ()
    for token in (*MARKS, *roles):
        word = token.isalpha()  # not the beginning of "sophisticated"
        tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True, single_word=word)])
    return tokenizer, TURNS.replace("{sop}", "sop").replace("{space}", " ") if roles else ROUNDS


def answer_ends(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Returns the tokens that end an answer: the end token, and the roles that may follow."""
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[token] for token in (tokenizer.eos_token, ROLES[1], ROLES[3]) if token in vocabulary]
