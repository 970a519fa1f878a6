"""Tiny runs to serve."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import InProcess, in_process
from tokenizers import Tokenizer

from replay_in_process import replay_in_process
from stoker.cli.main import main
from stoker.data.templates.chat_template import CHATML
from tiny_llama import save_tiny_llama

TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function.name }}: "
    "write <tool_call>...</tool_call>\n{% endfor %}<|im_end|>\n{% endif %}"
)


@pytest.fixture(scope="session")
def home(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model whose template takes tools, two LoRA runs over it and a full one."""
    home = tmp_path_factory.mktemp("served")
    save_tiny_llama(home / "tiny", tokenizer, template=TOOLS + CHATML, std=0.15, max_position_embeddings=256)
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
        with replay_in_process():
            assert main(["export", "two", "--format", "adapter", "--to", "adapter"]) == 0
    return home


@pytest.fixture(scope="session")
def served(home: Path) -> Iterator[InProcess]:
    """Both LoRA runs over one base, and the full run, in this process."""
    with in_process(home, ["one", "second=two", "full"]) as found:
        yield found
