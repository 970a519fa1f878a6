"""Fixtures of the training tests: a tiny language model in a folder, rows for it, and jobs run in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from stoker.checkpoint.store import State, Store
from stoker.job.load import LoadedJob, load_job
from stoker.job.render import scalar
from stoker.runs.folder import RunFolder
from stoker.train.loop import Loop, Outcome
from stoker.train.run import Prepared, prepare, start

WORDS = "the sea is blue and cold today how are you please write a poem about wind".split()


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


def write_rows(path: Path, rows: int, *, salt: int = 0) -> Path:
    """Instruction rows of uneven length, all different."""
    with path.open("w") as file:
        for i in range(rows):
            words = [WORDS[(i * 7 + j * (3 + salt)) % len(WORDS)] for j in range(2 + i % 5)]
            answer = " ".join([*reversed(words), str(i + salt)])
            file.write(json.dumps({"prompt": " ".join(words) + "?", "completion": answer}) + "\n")
    return path


@dataclass(frozen=True)
class Ran:
    """A job that has been run."""

    loaded: LoadedJob
    prepared: Prepared
    outcome: Outcome
    loop: Loop
    folder: RunFolder

    @property
    def store(self) -> Store:
        return self.loop.store

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.folder.read_metrics()]

    def last_state(self) -> State:
        """The newest checkpoint."""
        return self.store.load(self.store.steps()[-1])


RunJob = Callable[..., Ran]


def write_job(base: Path, job: dict[str, Any]) -> Path:
    """A job as a YAML file."""
    path = base / "job.yaml"
    path.write_text("".join(f"{key}: {scalar(value)}\n" for key, value in job.items()))
    return path


def run(base: Path, job: dict[str, Any], *overrides: str, **hooks: Any) -> Ran:
    """Runs a job as ``stoker train`` does; ``hooks`` replace attributes of the prepared task."""
    loaded = load_job(write_job(base, job), overrides)
    prepared = prepare(loaded, base)
    for name, value in hooks.items():
        setattr(prepared.task, name, value)
    assert loaded.job.output is not None
    folder = RunFolder(base / loaded.job.output)
    with folder.take():
        outcome, loop = start(prepared, folder, base, quiet=True)
    return Ran(loaded, prepared, outcome, loop, folder)


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


def assert_same_state(a: State, b: State) -> None:
    """Two checkpoints are equal to the bit: weights, optimizer, numbers."""
    assert a.step == b.step and a.numbers == b.numbers
    assert a.tensors.keys() == b.tensors.keys()
    for name, tensor in a.tensors.items():
        assert torch.equal(tensor, b.tensors[name]), name
