"""A job's small twin: the same family, the same kind of data, the same tuning and training, in seconds.

It is an ordinary job in a folder of its own (models in safetensors, rows, a job file for each layout), so
that what is verified goes through the code that trains.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, models
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast

from stoker.errors import UserError
from stoker.job.extension import Extension
from stoker.job.render import scalar
from stoker.job.schema import Job
from stoker.job.tuning import ADAPTERS, keys_of
from stoker.train.cells import Cell
from stoker.train.shrink import EXPERTS, HEADS, WIDTH, Shape, config_of, shrunk

SEQ_LEN = 32  # tokens
ROWS = 64
LONGEST_PROMPT, LONGEST_ANSWER = 14, 12  # tokens of most rows
LR, CLIP, EPS = 5e-3, 0.1, 1e-6
RANK = 4
VIRTUAL_TOKENS = 5
LAYERS = "0,2-"  # where not all blocks have adapters
WEIGHT_SCALE = 0.2  # of random matrices: attention is far from even
MOST_WEIGHTS = 20_000_000
FIRST_CHARACTER = 0x4E00  # one character is one token, and no normaliser touches these
TOKENS = 127  # fewer than the model's vocabulary, as often
KNOWN = 101  # of them those that the model knows, where the job gives it new ones
NEW_ROWS_FIRST = 2  # steps
END, PAD = "<|end|>", "<|pad|>"


@dataclass(frozen=True)
class Twin:
    """A job's small twin.

    Attributes:
        folder: holds everything.
        base: the job's keys but its model, its layout, its batch and its output.
        config: of the original model; None for a module.
        facts: what was changed beside the sizes, and why, for people.
    """

    folder: Path
    base: dict[str, Any]
    config: PreTrainedConfig | None
    facts: tuple[str, ...]

    def job_file(self, cell: Cell, *, beside: Cell | None = None) -> Path:
        """Writes the twin under a layout as a job file, and its model where it is not there yet.

        Args:
            beside: the layout whose model is to be taken, for the run in one process that it is compared with.

        Raises:
            UserError: there is no small model of this kind.
        """
        train = {**self.base["train"], **cell.train, **cell.batch}
        job = {**self.base, "train": train}
        if self.config is not None:
            job["tune"] = {**job["tune"], **cell.tune}
            # The tokenizer lies elsewhere: beside a model, transformers would rebuild it as that family's own.
            job["model"] = {"name": str(self._model_for(beside or cell)), "tokenizer": str(self.folder / "tokenizer")}
        if cell.parallel:
            job["parallel"] = cell.parallel
        number = len(list(self.folder.glob("job-*.yaml")))
        job["output"] = str(self.folder / f"run-{number}")
        path = self.folder / f"job-{number}.yaml"
        path.write_text("".join(f"{key}: {scalar(value)}\n" for key, value in job.items()), encoding="utf-8")
        return path

    def _model_for(self, cell: Cell) -> Path:
        assert self.config is not None
        experts = max(EXPERTS, cell.number("tensor"))
        folder = self.folder / f"model-{cell.blocks}-{experts}"
        if not folder.exists():
            config = shrunk(self.config, Shape(cell.blocks, experts))
            if self.base["tune"].get("new_rows_first"):
                config.get_text_config().vocab_size = KNOWN
            write_model(config, folder, self.base["seed"])
        return folder

    def describe(self) -> str:
        """``llama: width 64, 8 heads (2 of keys and values), vocabulary 131``, for people."""
        if self.config is None:
            return f"{self.base['module']['model']} itself"
        small = shrunk(self.config, Shape())
        groups = getattr(small, "num_key_value_heads", None)
        heads = f"{HEADS} heads" + (f" ({groups} of keys and values)" if groups not in (None, HEADS) else "")
        return f"{small.model_type}: width {small.hidden_size}, {heads}, vocabulary {small.vocab_size}"


def make_twin(job: Job, base: Path, folder: Path, *, steps: int, config: PreTrainedConfig | None = None) -> Twin:
    """The twin of a resolved job, in a folder.

    Args:
        base: the folder that the job's relative paths start from.
        steps: optimizer steps of each of its runs.
        config: the configuration of the job's model where it is at hand.

    Raises:
        UserError: the model's configuration cannot be read.
    """
    common: dict[str, Any] = {
        "task": job.task,
        "steps": steps,
        "seed": job.seed,
        "train": _train(job, steps),
        "checkpoint": {"every": steps, "best": False},
    }
    if job.task == "module":
        assert job.module is not None
        block = {name: value for name, value in job.module.model_dump().items() if value not in (None, {})}
        return Twin(folder, common | {"module": block}, None, ())
    assert job.model is not None
    config = config or config_of(job.model, base)
    tune, facts = _tune(job)
    write_rows(folder / "rows.jsonl", job.task, job.seed)
    tokenizer().save_pretrained(folder / "tokenizer")
    if job.tune.new_rows_first:
        pieces = tuple((2 + i, 3 + i) for i in range(TOKENS - KNOWN))
        Extension("a smaller one", "", "", KNOWN, pieces).write(folder / "tokenizer")
    source = {"path": str(folder / "rows.jsonl"), "format": "text"}
    if job.task != "pretrain":
        source |= {"format": "prompt", "template": "none"}
    train = common["train"] | {"seq_len": SEQ_LEN, "pack": job.train.pack}
    data = {"data": [source], "tune": tune, "train": train, "evaluate": {"fraction": 0.0}}
    return Twin(folder, common | data, config, facts)


def _train(job: Job, steps: int) -> dict[str, Any]:
    """The job's training with a rate and a clip that are felt within a few steps."""
    train = job.train
    values: dict[str, Any] = {
        "precision": "fp64",
        "lr": LR,
        "optimizer": train.optimizer,
        "schedule": train.schedule,
        "warmup": min(2, steps - 1),
        "weight_decay": train.weight_decay,
        "clip": CLIP if train.clip else 0.0,
    }
    if train.optimizer == "adamw":
        # Adam divides by the gradient's size: one that is zero but for rounding would become a whole step.
        values |= {"beta1": train.beta1, "beta2": train.beta2, "eps": max(EPS, train.eps)}
    return values


def _tune(job: Job) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The job's ``tune:`` block with a small rank, and what else was changed in it."""
    tune = job.tune
    if tune.method == "full":
        first = {"new_rows_first": min(tune.new_rows_first, NEW_ROWS_FIRST)} if tune.new_rows_first else {}
        return {"method": "full", **first}, ()
    facts = []
    if tune.method == "qlora" or (job.model is not None and job.model.quantise != "none"):
        facts.append("lora on a base in float64, as a quantised base cannot be compared exactly")
    if tune.dropout:
        facts.append("without dropout, whose numbers depend on how the work is cut")
    method = "lora" if tune.method in ADAPTERS else tune.method
    small: dict[str, Any] = {"rank": min(tune.rank, RANK), "dropout": 0.0, "width": WIDTH}
    small["tokens"] = min(tune.tokens, VIRTUAL_TOKENS)
    if tune.layers != "all":
        facts.append(f"adapters in the blocks {LAYERS} of a small model")
        small["layers"] = LAYERS
    keys = keys_of(method, deep=tune.deep)
    values = {key: value for key, value in {**tune.model_dump(), **small}.items() if key in keys}
    return {"method": method, **values}, tuple(facts)


def write_model(config: PreTrainedConfig, folder: Path, seed: int) -> None:
    """Writes a random model as ``save_pretrained`` does.

    Raises:
        UserError: transformers builds no such model, or it is not small.
    """
    try:
        with torch.device("meta"):
            count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        if count > MOST_WEIGHTS:
            raise UserError(f"{config.model_type}: the small twin would have {count:,} weights, which is not small")
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ZeroDivisionError) as error:
        raise UserError(f"there is no small twin of a {config.model_type}: {error}") from error
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases and norms are moved as well: at zero and one they would hide a piece in the wrong place.
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * WEIGHT_SCALE
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise / 2)
    model.config.eos_token_id = 1
    model.generation_config = GenerationConfig(eos_token_id=1)
    model.save_pretrained(folder)


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of which every token is one character."""
    characters = {chr(FIRST_CHARACTER + i): i + 2 for i in range(TOKENS - 2)}
    backend = Tokenizer(models.BPE({PAD: 0, END: 1, **characters}, []))
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, END)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=PAD)


def write_rows(path: Path, task: str, seed: int) -> None:
    """Documents of uneven length: some begin alike, one in eight has a single trained token, one fills a sequence."""
    generator = np.random.default_rng(seed)

    def text(length: int) -> str:
        return "".join(chr(FIRST_CHARACTER + i) for i in generator.integers(0, TOKENS - 2, length))

    beginning = text(10)
    rows = []
    for number in range(ROWS):
        prompt, answer = (
            text(int(generator.integers(1, LONGEST_PROMPT))),
            text(int(generator.integers(1, LONGEST_ANSWER))),
        )
        if number % 4 == 1:
            prompt = beginning
        if number % 8 == 3:  # cut behind the first token of the answer, or of the document
            prompt, answer = (text(1), "") if task == "pretrain" else (text(SEQ_LEN - 1), text(2))
        if number % 8 == 6:
            prompt, answer = text(LONGEST_PROMPT), text(SEQ_LEN)
        rows.append({"text": prompt + answer} if task == "pretrain" else {"prompt": prompt, "completion": answer})
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
