"""Fixtures of the evaluation tests: a folder with tiny runs that the command has trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from evaluation_rows import QUESTIONS, write_lines
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from stoker.cli.main import main
from stoker.data.chat_template import CHATML


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small are multiplied faster by one thread than by several that wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def base(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an untrained model ``tiny``, a run ``good`` that knows its answers, and ``bad`` that does not."""
    base = tmp_path_factory.mktemp("evaluate")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<pad>")
    fast.chat_template = CHATML
    fast.save_pretrained(base / "tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
        eos_token_id=fast.eos_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(base / "tiny")
    write_lines(base / "rows.jsonl", [{"prompt": q, "completion": a} for _ in range(4) for q, a in QUESTIONS])
    write_lines(base / "asked.jsonl", [{"prompt": q, "expected": a} for _ in range(4) for q, a in QUESTIONS])
    common = "task: sft\nmodel: tiny\ndata: rows.jsonl\ntune: full\n"
    common += "train: {lr: 1e-2, batch: 12, seq_len: 64, precision: fp32, warmup: 0, schedule: constant}\n"
    common += "evaluate: {fraction: 0}\n"
    (base / "good.yaml").write_text(common + "steps: 40\n")
    (base / "bad.yaml").write_text(common + "steps: 1\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(base)
        assert main(["train", "good.yaml", "--json"]) == 0
        assert main(["train", "bad.yaml", "--json"]) == 0
    return base


@pytest.fixture
def here(base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test runs in the folder of the runs."""
    monkeypatch.chdir(base)
    return base
