"""Whether an export answers as the run does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.checkpoint.export import Export, codec_of_run
from stoker.checkpoint.gguf_replay import ReplayRequest, replay
from stoker.checkpoint.replay import Answer, Question, answer, answer_afresh, compare
from stoker.checkpoint.tuned import TunedRun
from stoker.data.corpus import open_corpus
from stoker.errors import RunFailed, UserError
from stoker.models.adapters import unwrap
from stoker.models.quantise import quantisation

ROWS = 6
LONGEST = 96  # tokens of a row that are compared: the logits of a large vocabulary fill memory
# Largest difference of logits, as a share of their standard deviation. 16-bit weights carry 3 (bf16) or 11 (fp16)
# bits of mantissa less than float32; 8-bit blocks are off by about 0.6 % each, which adds up over the layers.
# bitsandbytes rounds activations to 8 bits, in which the least difference before is one of a whole step.
EIGHT_BIT = 5e-2
TOLERANCE = {"fp32": 2e-3, "fp16": 3e-2, "bf16": 0.2, "q8_0": 0.6}
CONVERSATION = [{"role": "user", "content": "Name 3 colours, please.\nThen  stop."}]
TEXTS = ["Hello, world!", "  two  spaces, 12345 digits\n\nand lines", "naïve café — 你好，世界 🙂"]


@dataclass(frozen=True)
class Reference:
    """What the trained model answers, kept before its weights are merged for the export.

    Attributes:
        trust_remote_code: whether the job lets the model's own code run.
        quantise, quantisation: of the base, as the job and as transformers say it.
    """

    questions: tuple[Question, ...]
    answers: tuple[Answer, ...]
    stop_ids: tuple[int, ...]
    conversation: tuple[int, ...]
    texts: tuple[tuple[int, ...], ...]
    trust_remote_code: bool = False
    quantise: str = "none"
    quantisation: Mapping[str, Any] | None = None


def take_reference(tuned: TunedRun, base: Path) -> Reference:
    """Asks the trained model what the export will be asked: held-out rows, training rows where there are none."""
    codec = codec_of_run(tuned)
    questions = tuple(_questions(tuned, base))
    stops = tuple(sorted(codec.stop_ids))
    conversation: tuple[int, ...] = ()
    if tuned.job.task != "pretrain":
        text = codec.template.render(CONVERSATION, prompt=True)
        conversation = tuple(codec.tokenizer.encode(text, add_special_tokens=False).ids)
    texts = tuple(tuple(codec.tokenizer.encode(t, add_special_tokens=False).ids) for t in TEXTS)
    assert tuned.job.model is not None
    settings = quantisation(tuned.job.model.quantise, unwrap(tuned.model).dtype)
    return Reference(
        questions,
        tuple(answer(tuned.model, questions, stops)),
        stops,
        conversation,
        texts,
        tuned.job.model.trust_remote_code,
        tuned.job.model.quantise,
        settings.to_dict() if settings is not None else None,
    )


def drift(trained: Reference, quantised: Reference) -> str:
    """How far the answers in fewer bits are from those of the trained model, in one line."""
    apart = [
        float((ours.logits - theirs.logits).square().mean().sqrt() / ours.logits.std())
        for ours, theirs in zip(trained.answers, quantised.answers, strict=True)
    ]
    equal = sum(a.tokens == b.tokens for a, b in zip(trained.answers, quantised.answers, strict=True))
    return (
        f"in fewer bits logits are {sum(apart) / len(apart):.1e} of their spread from the trained ones (root mean "
        f"square), {equal} of {len(apart)} greedy answers equal"
    )


def _questions(tuned: TunedRun, base: Path) -> list[Question]:
    corpus = open_corpus(tuned.job, tuned.text.codec, seq_len=tuned.text.seq_len, base=base)
    documents = corpus.evaluation_documents() or corpus.sequences[0]
    step = max(1, len(documents) // ROWS)
    questions = []
    for document in documents[::step][:ROWS]:
        ids = tuple(int(i) for i in document.row.ids[:LONGEST])
        trained = document.row.trained[: len(ids)]
        prompt = int(trained.argmax()) if tuned.job.task != "pretrain" and trained.any() else len(ids) // 2
        questions.append(Question(ids, max(1, min(prompt, len(ids) - 1))))
    corpus.close()
    return questions


def verify(reference: Reference, export: Export, written: Path) -> str:
    """Replays the artifact and compares; one line for people.

    Raises:
        RunFailed: it cannot be loaded, or answers, stops or tokenises differently.
    """
    if export.format == "gguf":
        return _verify_gguf(reference, export, written)
    conversation = CONVERSATION if reference.conversation else []
    replayed, encoded = answer_afresh(
        written,
        reference.questions,
        reference.stop_ids,
        conversation,
        trust_remote_code=reference.trust_remote_code,
        quantisation=reference.quantisation,
    )
    if tuple(encoded) != reference.conversation:
        raise RunFailed("the export's chat template or tokenizer gives other tokens than the training's")
    eight_bit = "8bit" in (reference.quantise, export.quantise)
    tolerance = max(TOLERANCE[export.weights], EIGHT_BIT if eight_bit else 0.0)
    return compare(reference.answers, replayed, reference.questions, reference.stop_ids, tolerance)


def _verify_gguf(reference: Reference, export: Export, written: Path) -> str:
    """Through llama.cpp where it is installed: tokens, first-token log-probabilities, and greedy answers."""
    request = ReplayRequest(
        prompts=[list(q.ids[: q.prompt]) for q in reference.questions],
        texts=TEXTS,
        conversations=[CONVERSATION] if reference.conversation else [],
    )
    try:
        got, program = replay(written, request, through="llamacpp"), "llama.cpp"
    except UserError:
        got, program = (
            replay(written, request, through="transformers"),
            "transformers (llama.cpp is not installed)",
        )
    tolerance = TOLERANCE[export.weights]
    worst, equal = 0.0, 0
    for question, ours, theirs in zip(reference.questions, reference.answers, got.continuations, strict=True):
        logits = ours.logits[question.prompt - 1]
        expected = logits.log_softmax(-1)
        for token, log_probability in theirs.first.items():
            worst = max(worst, float((expected[token] - log_probability).abs() / logits.std()))
        ours_until = ours.tokens[: len(theirs.tokens)]
        equal += tuple(theirs.tokens[: len(ours_until)]) == ours_until
    if worst > tolerance:
        raise RunFailed(
            f"the GGUF answers differently in {program}: log-probabilities differ by {worst:.2g} of the logits' "
            f"spread, {tolerance:g} is allowed"
        )
    _check_text(reference, got.encodings, program)
    return (
        f"replayed {len(reference.questions)} rows through {program}: log-probabilities within {worst:.1e} of the "
        f"logits' spread ({tolerance:g} allowed), {equal} of {len(reference.questions)} greedy answers equal, "
        "tokens equal"
    )


def _check_text(reference: Reference, encodings: Sequence[Sequence[int]], program: str) -> None:
    for text, ours, theirs in zip(TEXTS, reference.texts, encodings, strict=True):
        if list(ours) != list(theirs):
            raise RunFailed(
                f"the GGUF tokenises differently in {program}: {text!r} gives {list(theirs)[:8]}, "
                f"trained {list(ours)[:8]}"
            )
