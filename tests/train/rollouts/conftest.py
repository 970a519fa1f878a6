"""The job of the tests of policies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tiny_llama import save_tiny_llama

LETTER = """def e(answer, expected, row):
    text = "".join(answer.split())
    return text.count("e") / max(1, len(text))
"""


@pytest.fixture
def job(base: Path, sft: dict[str, Any]) -> dict[str, Any]:
    """A job whose answers are rewarded for the letter e."""
    (base / "letter.py").write_text(LETTER)
    with (base / "asked.jsonl").open("w") as file:
        for i in range(24):
            file.write(json.dumps({"prompt": f"Say {i} words about the sea", "expected": str(i)}) + "\n")
    return {
        **sft,
        "task": "grpo",
        "data": "asked.jsonl",
        "steps": 6,
        "train": {"batch": 8, "lr": 3e-3, "seq_len": 64, "precision": "fp32", "warmup": 0, "schedule": "constant"},
        "grpo": {
            "rewards": "python:letter:e",
            "prompts": 4,
            "answers": 4,
            "max_tokens": 8,
            "epochs": 2,
            "kl": 0.02,
        },
        "checkpoint": {"every": 1, "keep": 20, "memory": 0},
    }


@pytest.fixture
def ppo(job: dict[str, Any]) -> dict[str, Any]:
    """Prompts and a reward for a policy."""
    block = {"rewards": "python:letter:e", "prompts": 8, "max_tokens": 8, "epochs": 2, "kl": 0.05}
    return {**{key: value for key, value in job.items() if key != "grpo"}, "task": "ppo", "ppo": block}


@pytest.fixture
def wide(base: Path, tokenizer: Tokenizer) -> Path:
    """Another model with the policy's tokenizer: other sizes, and other heads."""
    sizes = {"hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3, "num_key_value_heads": 4}
    return save_tiny_llama(base / "wide", tokenizer, template=None, **sizes)
