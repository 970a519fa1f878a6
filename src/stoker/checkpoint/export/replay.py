"""Replays rows through an export in a fresh process with transformers and peft.

Run as ``python -m stoker.checkpoint.export.replay FOLDER``, this file is that process, which uses none of Stoker's
loading. It reads the request as JSON from stdin and writes the answer to a safetensors file.

Shapes: N scored positions, V vocabulary.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from stoker.errors import RunFailed, signal_name
from stoker.models.hf_config import IMAGE_TEXT
from stoker.models.tuning.packed_experts import pack_loaded_experts
from stoker.models.tuning.quantise import compute_exactly
from stoker.models.tuning.virtual_tokens import virtual_ids

NEW_TOKENS = 24
STARTING = 900.0  # timeout in seconds, whatever the model's size
BYTES_PER_SECOND = 4e6  # of weights: about twenty times slower than reading from disk and scoring the rows
Conversation = list[dict[str, str]]


@dataclass(frozen=True)
class ReplayRow:
    """A row to replay.

    Attributes:
        ids: tokens of prompt and answer.
        prompt: number of tokens of the prompt.
        positions: positions whose next token is trained.
    """

    ids: tuple[int, ...]
    prompt: int
    positions: tuple[int, ...]

    @property
    def targets(self) -> Tensor:
        """Tokens after the positions, shape (N,)."""
        return torch.tensor([self.ids[p + 1] for p in self.positions])


@dataclass(frozen=True)
class ReplayAnswer:
    """A model's answer for a row.

    Attributes:
        logits: logits at the row's positions, shape (N, V).
        tokens: the greedy continuation of the prompt, with its stop token.
    """

    logits: Tensor
    tokens: tuple[int, ...]

    def scores(self, question: ReplayRow) -> Tensor:
        """Returns the log-probabilities of the row's targets, shape (N,)."""
        return self.logits.log_softmax(-1).gather(1, question.targets[:, None]).squeeze(1)


@dataclass(frozen=True)
class TextAnswers:
    """A tokenizer, and its results for texts and conversations.

    Attributes:
        vocabulary: tokens by id, in JSON.
        template: the chat template; None without one.
        texts: ids of each text, special tokens not added.
        rendered: each conversation as a prompt for the next answer.
    """

    vocabulary: str
    template: str | None
    texts: list[list[int]]
    rendered: list[str]


@dataclass(frozen=True)
class ReplayRequest:
    """The request to the fresh process.

    Attributes:
        texts, conversations: for `TextAnswers`.
        trust_remote_code: whether the model's own code may run.
        quantisation: transformers' settings of an adapter's quantised base.
        packs_experts: whether the experts of such a base are packed, too.
        base: path of an adapter's base on this machine; None for the base it names.
        dtype: dtype to load the weights in, before they are cast to float32; None for the stored one.
        cached: whether tokens are generated with the library's cache of keys and values.
    """

    questions: Sequence[ReplayRow]
    stop_ids: Sequence[int]
    texts: Sequence[str]
    conversations: Sequence[Conversation] = ()
    trust_remote_code: bool = False
    quantisation: Mapping[str, Any] | None = None
    packs_experts: bool = False
    base: str | None = None
    dtype: str | None = None
    cached: bool = True


@torch.inference_mode()
def answer(
    model: nn.Module, questions: Sequence[ReplayRow], stop_ids: Sequence[int], *, cached: bool = True
) -> list[ReplayAnswer]:
    """Replays rows through a model in this process; arguments as of `ReplayRequest`."""
    device = next(model.parameters()).device
    front = virtual_ids(model)
    answers = []
    for question in questions:
        ids = torch.tensor([[*front, *question.ids]], device=device)
        logits = model(input_ids=ids).logits[0, -len(question.ids) :]
        scored = logits[torch.tensor(question.positions, device=device)].float().cpu()
        prompt = ids[:, : len(front) + question.prompt]
        generated = _generated(model, prompt, stop_ids) if cached else _repeated(model, prompt, stop_ids)
        answers.append(ReplayAnswer(scored, tuple(int(t) for t in generated[0, prompt.shape[1] :])))
    return answers


def _generated(model: nn.Module, prompt: Tensor, stop_ids: Sequence[int]) -> Tensor:
    """Returns a prompt, shape (1, T), with its greedy continuation by the library."""
    return model.generate(  # type: ignore[operator]
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=list(stop_ids) or None,
        pad_token_id=min(stop_ids, default=0),
    )


def _repeated(model: nn.Module, ids: Tensor, stop_ids: Sequence[int]) -> Tensor:
    """Returns the same by a pass over all tokens for each new one."""
    for _ in range(NEW_TOKENS):
        token = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, -1].argmax()
        ids = torch.cat([ids, token[None, None]], dim=1)
        if int(token) in stop_ids:
            break
    return ids


@torch.inference_mode()
def next_logits(model: nn.Module, ids: Sequence[int]) -> Tensor:
    """Returns the logits of the next token after a row, shape (V,)."""
    row = torch.tensor([[*virtual_ids(model), *ids]], device=next(model.parameters()).device)
    return model(input_ids=row).logits[0, -1].float().cpu()


def vocabulary_of(tokens: Mapping[str, int]) -> str:
    """Returns the tokens of a vocabulary by id, as JSON."""
    return json.dumps(sorted(tokens, key=lambda token: tokens[token]), ensure_ascii=False)


def answer_afresh(artifact: Path, request: ReplayRequest) -> tuple[list[ReplayAnswer], TextAnswers]:
    """Replays rows through the export in a folder, or a GGUF file, in a fresh process.

    Raises:
        RunFailed: the artifact cannot be loaded by transformers and peft, or the process takes longer than
            `time_limit`.
    """
    limit = time_limit(artifact, request.base)
    with TemporaryDirectory() as temporary:
        out = Path(temporary) / "answers.safetensors"
        named = with_base(artifact, request.base, Path(temporary))
        done = ask_afresh("stoker.checkpoint.export.replay", named, asdict(request) | {"out": str(out)}, limit)
        if done.returncode:
            raise RunFailed(f"the export cannot be loaded: {reason_of_end(done)}")
        with safe_open(out, "pt") as file:
            tokens = [tuple(file.get_tensor(f"tokens.{i}").tolist()) for i in range(len(request.questions))]
            answers = [ReplayAnswer(file.get_tensor(f"logits.{i}"), ids) for i, ids in enumerate(tokens)]
            return answers, TextAnswers(**json.loads(file.metadata()["texts"]))


def ask_afresh(
    module: str, artifact: Path, request: Mapping[str, Any], limit: float
) -> subprocess.CompletedProcess[str]:
    """Runs a module on an export in a fresh process, which reads the request from its standard input.

    Args:
        limit: timeout in seconds.

    Raises:
        RunFailed: the process takes longer.
    """
    command = [sys.executable, "-P", "-m", module, str(artifact)]
    try:
        return subprocess.run(
            command, input=json.dumps(request), capture_output=True, text=True, check=False, timeout=limit
        )
    except subprocess.TimeoutExpired as error:
        raise RunFailed(
            f"the export gave no answer within {limit:.0f} s in a fresh process, so it is not checked; export it "
            "again where the machine has more memory, or less to do"
        ) from error


def reason_of_end(done: subprocess.CompletedProcess[str]) -> str:
    """Returns the error of a process that failed, or how it ended if it was killed or gave none."""
    if done.returncode < 0:
        return f"the process that loads it was killed by {signal_name(-done.returncode)}"
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"the process that loads it ended with exit code {done.returncode}"


def time_limit(artifact: Path, base: str | None) -> float:
    """Returns the timeout of a replay in seconds: `STARTING`, plus the time that the weights need at
    `BYTES_PER_SECOND`.

    Args:
        base: path of an adapter's base.
    """
    places = [artifact, *([Path(base)] if base is not None else [])]
    files = (file for place in places for file in (place.iterdir() if place.is_dir() else [place]))
    return STARTING + sum(file.stat().st_size for file in files if file.is_file()) / BYTES_PER_SECOND


def with_base(folder: Path, base: str | None, temporary: Path) -> Path:
    """Returns a copy of an adapter that names its base by its path on this machine."""
    config = folder / "adapter_config.json"
    if base is None or not config.is_file():
        return folder
    here = temporary / "adapter"
    here.mkdir()
    for path in folder.iterdir():
        if path != config:
            (here / path.name).symlink_to(path.resolve())
    named = json.loads(config.read_text("utf-8")) | {"base_model_name_or_path": base}
    (here / config.name).write_text(json.dumps(named))
    return here


def _loader(folder: Path, *, trust: bool) -> Callable[..., nn.Module]:
    """Returns the function of transformers, or of peft, that loads a folder with its own class."""
    adapter = folder / "adapter_config.json"
    where = json.loads(adapter.read_text("utf-8"))["base_model_name_or_path"] if adapter.is_file() else str(folder)
    kind = AutoConfig.from_pretrained(where, trust_remote_code=trust).model_type
    auto: Any = AutoModelForImageTextToText if kind in IMAGE_TEXT else AutoModelForCausalLM
    if adapter.is_file():
        from peft import AutoPeftModelForCausalLM

        auto = type("AutoPeftModel", (AutoPeftModelForCausalLM,), {"_target_class": auto})
    load: Callable[..., nn.Module] = auto.from_pretrained
    return load


def _main(arguments: list[str]) -> None:
    from transformers import AutoTokenizer

    asked = json.load(sys.stdin)
    folder, file = Path(arguments[0]), {}
    if folder.suffix == ".gguf":
        folder, file = folder.parent, {"gguf_file": folder.name}
    trust = asked["trust_remote_code"]
    load = _loader(folder, trust=trust) if not file else AutoModelForCausalLM.from_pretrained
    settings = {"quantization_config": asked["quantisation"]} if asked["quantisation"] else {}
    model = load(str(folder), trust_remote_code=trust, dtype=asked["dtype"] or "auto", **settings, **file).eval()
    if not getattr(model, "is_quantized", False) and not asked["quantisation"]:
        model = model.float()
    if asked["quantisation"] and asked["packs_experts"]:
        pack_loaded_experts(model)
    compute_exactly(model)
    questions = [ReplayRow(tuple(q["ids"]), q["prompt"], tuple(q["positions"])) for q in asked["questions"]]
    tensors = {}
    for i, given in enumerate(answer(model, questions, asked["stop_ids"], cached=asked["cached"])):
        tensors[f"logits.{i}"] = given.logits.contiguous()
        tensors[f"tokens.{i}"] = torch.tensor(given.tokens, dtype=torch.int64)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust, **file)
    template = tokenizer.chat_template
    said = TextAnswers(
        vocabulary=vocabulary_of(tokenizer.get_vocab()),
        template=template if isinstance(template, str) else None,
        texts=[tokenizer(text, add_special_tokens=False)["input_ids"] for text in asked["texts"]],
        rendered=[
            str(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))
            for turns in asked["conversations"]
        ],
    )
    save_file(tensors, asked["out"], metadata={"texts": json.dumps(asdict(said))})


if __name__ == "__main__":
    _main(sys.argv[1:])
