"""Fixtures of the training tests: a tiny language model in a folder, rows and a job for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from running import write_rows
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small are multiplied faster by one thread than by several that wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_model(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a two-layer Llama in float32 and a byte-level tokenizer with the ChatML template."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<pad>")
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=128,
        eos_token_id=fast.eos_token_id,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """An empty folder that jobs are run from, with 40 rows of data in it."""
    write_rows(tmp_path / "rows.jsonl", 40)
    return tmp_path


@pytest.fixture
def sft(tiny_model: Path) -> dict[str, Any]:
    """A job for twelve steps on the rows, without anything held out."""
    return {
        "task": "sft",
        "model": str(tiny_model),
        "data": "rows.jsonl",
        "steps": 12,
        "output": "run",
        "train": {"batch": 4, "lr": 1e-2, "seq_len": 64, "precision": "fp32"},
        "evaluate": {"fraction": 0.0},
    }
