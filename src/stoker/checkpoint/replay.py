"""Replaying an export: the same prompts through the artifact in a fresh process, by the program that will serve it.

Run as ``python -m stoker.checkpoint.replay FOLDER`` it is that fresh process: plain transformers and peft, nothing
of Stoker's loading. The request comes as JSON on stdin, the answer goes into a safetensors file.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stoker.errors import RunFailed
from stoker.models.virtual import virtual_ids

NEW_TOKENS = 24


@dataclass(frozen=True)
class Question:
    """One held-out row.

    Attributes:
        ids: the row's tokens, prompt and answer.
        prompt: how many of them are the prompt.
    """

    ids: tuple[int, ...]
    prompt: int


@dataclass(frozen=True)
class Answer:
    """What a model says to a question.

    Attributes:
        logits: at every position of the row, shape (T, V).
        tokens: the greedy continuation of the prompt, its stop token included.
    """

    logits: Tensor
    tokens: tuple[int, ...]


@torch.inference_mode()
def answer(model: nn.Module, questions: Sequence[Question], stop_ids: Sequence[int]) -> list[Answer]:
    """Asks a model in this process."""
    device = next(model.parameters()).device
    front = virtual_ids(model)
    answers = []
    for question in questions:
        ids = torch.tensor([[*front, *question.ids]], device=device)
        logits = model(input_ids=ids).logits[0, -len(question.ids) :].float().cpu()
        prompt = ids[:, : len(front) + question.prompt]
        generated = model.generate(  # type: ignore[operator]
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=list(stop_ids) or None,
            pad_token_id=min(stop_ids, default=0),
        )
        answers.append(Answer(logits, tuple(int(t) for t in generated[0, prompt.shape[1] :])))
    return answers


def answer_afresh(
    folder: Path,
    questions: Sequence[Question],
    stop_ids: Sequence[int],
    conversation: list[dict[str, str]],
    *,
    trust_remote_code: bool = False,
    quantisation: Mapping[str, Any] | None = None,
) -> tuple[list[Answer], list[int]]:
    """Asks the artifact in a folder, in a fresh process; also how its own tokenizer encodes a conversation.

    Args:
        trust_remote_code: whether modelling code that comes with the model may run there too.
        quantisation: transformers' settings of an adapter's base, where that is quantised.

    Raises:
        RunFailed: the artifact cannot be loaded by transformers and peft.
    """
    with TemporaryDirectory() as temporary:
        out = Path(temporary) / "answers.safetensors"
        request = {
            "questions": [asdict(q) for q in questions],
            "stop_ids": list(stop_ids),
            "conversation": conversation,
            "trust_remote_code": trust_remote_code,
            "quantisation": quantisation,
            "out": str(out),
        }
        done = subprocess.run(
            [sys.executable, "-P", "-m", "stoker.checkpoint.replay", str(folder)],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RunFailed(f"the export cannot be loaded: {done.stderr.strip().splitlines()[-1]}")
        tensors = load_file(out)
        encoded = [int(i) for i in tensors.pop("conversation")]
        count = len(questions)
        return [Answer(tensors[f"logits.{i}"], tuple(tensors[f"tokens.{i}"].tolist())) for i in range(count)], encoded


def compare(
    reference: Sequence[Answer],
    replayed: Sequence[Answer],
    questions: Sequence[Question],
    stop_ids: Sequence[int],
    tolerance: float,
) -> str:
    """One line of what was compared; the figures of a sound export.

    The logits are compared relative to their standard deviation, so one tolerance serves every model. A greedy
    continuation may part where two tokens are as likely as each other to within the tolerance, and nowhere else.

    Raises:
        RunFailed: the logits or the stop behaviour differ.
    """
    largest = 0.0
    for question, whole, theirs in zip(questions, reference, replayed, strict=True):
        # An adapter's base has no rows beyond its last token; the trained model may have some to fill it up.
        ours = replace(whole, logits=whole.logits[:, : theirs.logits.shape[1]])
        difference = float((ours.logits - theirs.logits).abs().max() / ours.logits.std())
        largest = max(largest, float("inf") if math.isnan(difference) else difference)
        if largest > tolerance:
            break
        _compare_stop(question, ours, theirs, stop_ids, tolerance)
    if largest > tolerance:
        raise RunFailed(
            f"the export answers differently: logits differ by {largest:.2g} of their spread, {tolerance:g} is allowed"
        )
    equal = sum(a.tokens == b.tokens for a, b in zip(reference, replayed, strict=True))
    return (
        f"replayed {len(questions)} rows in a fresh process: logits within {largest:.1e} of their spread "
        f"({tolerance:g} allowed), {equal} of {len(questions)} greedy answers equal, stop tokens as trained"
    )


def _compare_stop(question: Question, ours: Answer, theirs: Answer, stop_ids: Sequence[int], tolerance: float) -> None:
    stops = [i for i in stop_ids if i < ours.logits.shape[1]]
    if not stops:
        return
    last = len(question.ids) - 1
    wanted = [p for p in range(question.prompt, last) if question.ids[p + 1] in stops] or [last]
    for position in wanted:
        a = ours.logits[position].log_softmax(-1)[stops].logsumexp(0)
        b = theirs.logits[position].log_softmax(-1)[stops].logsumexp(0)
        if float((a - b).abs()) > 2 * tolerance * float(ours.logits.std()):
            raise RunFailed(
                f"the export stops differently: log-probability of stopping {float(b):.3f}, trained {float(a):.3f}"
            )


def _main(arguments: list[str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    request = json.load(sys.stdin)
    folder = Path(arguments[0])
    load: Callable[..., nn.Module] = AutoModelForCausalLM.from_pretrained
    if (folder / "adapter_config.json").is_file():
        from peft import AutoPeftModelForCausalLM

        load = AutoPeftModelForCausalLM.from_pretrained
    trust = request["trust_remote_code"]
    settings = {"quantization_config": request["quantisation"]} if request["quantisation"] else {}
    model = load(str(folder), trust_remote_code=trust, **settings).eval()
    kernel = "support_avx512bf16_for_cpu"  # bitsandbytes' for inference on some processors rounds to bfloat16
    for module in model.modules():
        if hasattr(module, kernel):
            setattr(module, kernel, False)
    questions = [Question(tuple(q["ids"]), q["prompt"]) for q in request["questions"]]
    tensors = {}
    for i, given in enumerate(answer(model, questions, request["stop_ids"])):
        tensors[f"logits.{i}"] = given.logits
        tensors[f"tokens.{i}"] = torch.tensor(given.tokens, dtype=torch.int64)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
    conversation = request["conversation"]
    encoded = (
        tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
        if conversation
        else []
    )
    tensors["conversation"] = torch.tensor(encoded, dtype=torch.int64)
    save_file(tensors, request["out"])


if __name__ == "__main__":
    _main(sys.argv[1:])
