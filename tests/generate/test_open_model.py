"""What an open model makes of texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedTokenizerFast,
)

from stoker.errors import UserError
from stoker.evaluate.ask_model import prompts_of
from stoker.generate.open_model import open_model
from stoker.scoring.answer_rows import AnswerRow
from tiny_llama import save_tiny_llama


def test_plain_text_follows_what_the_tokenizer_puts_before_documents(tokenizer: Tokenizer, tmp_path: Path) -> None:
    framed = Tokenizer.from_str(tokenizer.to_str())
    before, after = framed.token_to_id("<pad>"), framed.token_to_id("<|im_end|>")
    framed.post_processor = processors.TemplateProcessing(
        "<pad> $A <|im_end|>", None, [("<pad>", before), ("<|im_end|>", after)]
    )
    PreTrainedTokenizerFast(tokenizer_object=framed, eos_token="<|im_end|>").save_pretrained(tmp_path)
    config = LlamaConfig(
        vocab_size=framed.get_vocab_size(),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        eos_token_id=after,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    opened = open_model(str(tmp_path), tmp_path)
    plain = tokenizer.encode("The wind is cold.", add_special_tokens=False).ids
    assert opened.decoder.blocked is not None  # its weights never change
    assert opened.text_ids("The wind is cold.") == [before, *plain]
    turns = ({"role": "user", "content": "The wind is cold."},)
    row = AnswerRow("rows.jsonl", 1, turns, None, (), {})
    assert prompts_of(opened, [row], [turns]) == [[before, *plain]]


def test_a_token_without_an_embedding_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    last = tokenizer.get_vocab_size() - 1
    save_tiny_llama(tmp_path, tokenizer, vocab_size=last)
    opened = open_model(str(tmp_path), tmp_path)
    assert last not in opened.text_ids("e")
    text = tokenizer.decode([last], skip_special_tokens=False)
    assert last in tokenizer.encode(text, add_special_tokens=False).ids
    refused = f"has the token .* with id {last}, and {tmp_path.name} has embeddings of {last} tokens; put the tokenizer"
    with pytest.raises(UserError, match=refused):
        opened.text_ids(text)
    with pytest.raises(UserError, match=refused):
        opened.prompt_ids([{"role": "user", "content": text}])


def test_a_model_that_begins_from_random_weights_is_not_looked_for_at_the_hub(tmp_path: Path) -> None:
    message = "llama-3m begins from random weights and has no tokenizer before it is trained; train it"
    with pytest.raises(UserError, match=message):
        open_model("llama-3m", tmp_path)


@pytest.mark.parametrize("kind", [LlamaForSequenceClassification, LlamaForTokenClassification])
def test_a_classifier_does_not_write_with_its_tied_embeddings(kind: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tiny_llama(tmp_path, tokenizer, tie_word_embeddings=True)
    classifier = kind.from_pretrained(tmp_path, num_labels=1)
    classifier.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="the weights of a classifier, which scores texts and"):
        open_model(str(tmp_path), tmp_path)
