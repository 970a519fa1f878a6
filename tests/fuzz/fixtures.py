"""What the cases are made from: tiny models in folders and a GGUF file, rows, documents."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny_tokenizer import tiny_tokenizer

QUESTIONS = ["What is the capital of France?", "How are you today?", "Write a poem about the sea.", "What is 3 + 4?"]
SIZES = {
    "vocab_size": 400, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 128, "eos_token_id": 2, "bos_token_id": None,
}  # fmt: skip


def instruction(number: int) -> dict[str, str]:
    """A row of questions and answers, under the names that several recipes use."""
    question = f"{number}. {QUESTIONS[number % 4]}"
    return {"instruction": question, "output": "Paris, and well.", "question": question, "topic": "history"}


def write_data(folder: Path) -> None:
    """``rows.jsonl``, ``docs.jsonl`` and a template."""
    rows = "".join(json.dumps(instruction(number)) + "\n" for number in range(40))
    (folder / "rows.jsonl").write_text(rows, encoding="utf-8")
    documents = "".join(json.dumps({"text": f"{number}. {QUESTIONS[number % 4]}"}) + "\n" for number in range(200))
    (folder / "docs.jsonl").write_text(documents, encoding="utf-8")
    (folder / "x.jinja").write_text("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}")


def write_models(folder: Path) -> None:
    """Folders of a Llama, the same in two files with an index, a GPT-2, a mixture; the Llama as a GGUF file."""
    import torch
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
        PreTrainedTokenizerFast,
    )

    from stoker.checkpoint.export.gguf_writer import write_gguf
    from stoker.data.templates.chat_template import BUILT_IN

    fast = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer(), eos_token="<|im_end|>", pad_token="<pad>")
    fast.chat_template = BUILT_IN["chatml"]
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    mixture = {**SIZES, "num_local_experts": 4}
    gpt2 = GPT2Config(vocab_size=400, n_embd=32, n_layer=2, n_head=4, n_positions=128, eos_token_id=2, bos_token_id=2)
    for name, model in (
        ("tiny", llama),
        ("sharded", llama),
        ("gpt2", GPT2LMHeadModel(gpt2)),
        ("mixtral", MixtralForCausalLM(MixtralConfig(**mixture))),
    ):
        model.save_pretrained(folder / name, max_shard_size="40KB" if name == "sharded" else "1GB")
        fast.save_pretrained(folder / name)
    (folder / "gguf").mkdir()
    write_gguf(llama, fast, folder / "gguf" / "tiny.gguf", name="tiny", stops=())
