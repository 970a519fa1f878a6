"""Tiny runs to serve."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from serving import InProcess, in_process
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from stoker.cli.main import main
from stoker.data.chat_template import CHATML

TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function.name }}: "
    "write <tool_call>...</tool_call>\n{% endfor %}<|im_end|>\n{% endif %}"
)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small are multiplied faster by one thread than by several that wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def home(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model whose template takes tools, two LoRA runs over it and a full one."""
    home = tmp_path_factory.mktemp("served")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<pad>")
    fast.chat_template = TOOLS + CHATML
    fast.save_pretrained(home / "tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=256,
        eos_token_id=fast.eos_token_id,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    model.save_pretrained(home / "tiny")
    rows = ({"prompt": f"Who is {i}?", "completion": f"The wind {i} is cold."} for i in range(12))
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = "task: sft\nmodel: tiny\ndata: rows.jsonl\nsteps: 6\n"
    common += "train: {batch: 4, seq_len: 64, precision: fp32, lr: %s}\n"
    (home / "one.yaml").write_text(common % "2e-2" + "tune: {method: lora, rank: 4}\n")
    (home / "two.yaml").write_text(common % "1e-2" + "tune: {method: lora, rank: 8}\nseed: 0\n")
    (home / "full.yaml").write_text(common % "1e-2" + "tune: full\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        for name in ("one", "two", "full"):
            assert main(["train", f"{name}.yaml"]) == 0
        assert main(["export", "two", "--format", "adapter", "--to", "adapter"]) == 0
    return home


@pytest.fixture(scope="session")
def served(home: Path) -> Iterator[InProcess]:
    """Both LoRA runs over one base, and the full run, in this process."""
    with in_process(home, ["one", "second=two", "full"]) as found:
        yield found
