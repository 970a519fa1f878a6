"""The trained model's answers, taken before its weights are merged, for comparison with the export's."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from stoker.checkpoint.export.replay import (
    Conversation,
    ReplayAnswer,
    ReplayRequest,
    ReplayRow,
    TextAnswers,
    answer,
    vocabulary_of,
)
from stoker.checkpoint.export.write_export import base_of, codec_of_run
from stoker.checkpoint.load_run import TunedRun
from stoker.data.corpus import open_corpus
from stoker.data.templates.template_environment import TemplateRefused
from stoker.data.text_codec import TextCodec
from stoker.job.task_spec import task_of
from stoker.models.tuning.adapters import unwrap
from stoker.models.tuning.packed_experts import has_packed_experts
from stoker.models.tuning.quantise import quantisation

ROWS = 6
LONGEST = 1024  # tokens of a row; its prompt is cut at the start
SCORED = 64  # trained tokens per row: logits of a large vocabulary use much memory
CONVERSATIONS: tuple[Conversation, ...] = (
    [{"role": "user", "content": "Name 3 colours, please.\nThen  stop."}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}],
    [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! How can I help?"},
        {"role": "user", "content": "Name a colour."},
    ],
)
TEXTS = ("Hello, world!", "  two  spaces, 12345 digits\n\nand lines", "naïve café — 你好，世界 🙂")


@dataclass(frozen=True)
class ReferenceAnswers:
    """The trained model's answers.

    Attributes:
        request: request to the fresh process.
        answers: the trained model's answers to the questions.
        texts: results of the trained run's tokenizer and template.
        start: the text of the start token; empty without one.
        held_out: whether the rows were held out of training.
        tokenizer: the content of the run's ``tokenizer.json``.
    """

    request: ReplayRequest
    answers: tuple[ReplayAnswer, ...]
    texts: TextAnswers
    start: str
    held_out: bool
    tokenizer: str
    quantise: str = "none"

    @property
    def questions(self) -> Sequence[ReplayRow]:
        return self.request.questions

    @property
    def stop_ids(self) -> Sequence[int]:
        return self.request.stop_ids


def take_reference(tuned: TunedRun, base: Path) -> ReferenceAnswers:
    """Replays held-out rows, or training rows if there are none, through the trained model.

    Casts the model to float32, unless its base is quantised.
    """
    assert tuned.job.model is not None
    codec = codec_of_run(tuned)
    questions, held_out = _questions(tuned, base)
    stops = tuple(sorted(codec.stop_ids))
    model = unwrap(tuned.model)
    settings = quantisation(tuned.job.model.quantise, model.dtype, model=model)
    dtype = str(model.dtype).removeprefix("torch.")
    if settings is None:
        tuned.model.float()
    texts, conversations, expected = _texts(tuned, codec, questions)
    request = ReplayRequest(
        questions=questions,
        stop_ids=stops,
        texts=texts,
        conversations=conversations,
        trust_remote_code=tuned.job.model.trust_remote_code,
        quantisation=settings.to_dict() if settings is not None else None,
        packs_experts=has_packed_experts(model),
        base=base_of(tuned, base),
        dtype=dtype,
    )
    answers = tuple(answer(tuned.model, questions, stops))
    start = tuned.tokenizer.bos_token or ""
    return ReferenceAnswers(
        request, answers, expected, start, held_out, codec.definition, quantise=tuned.job.model.quantise
    )


def _questions(tuned: TunedRun, base: Path) -> tuple[tuple[ReplayRow, ...], bool]:
    with closing(open_corpus(tuned.job, tuned.text.codec, seq_len=tuned.text.seq_len, base=base)) as corpus:
        held_out = corpus.evaluation_documents()
        documents = held_out or corpus.sequences[0]
        step = max(1, len(documents) // ROWS)
        rows = [(d.row.ids, d.row.trained) for d in documents[::step][:ROWS]]
        questions = tuple(_question(ids.tolist(), trained.tolist()) for ids, trained in rows if trained[1:].any())
        return questions, bool(held_out)


def _question(ids: list[int], trained: list[bool]) -> ReplayRow:
    """Returns the replay row with the first and the last trained tokens of a row."""
    targets = [place for place in range(1, len(ids)) if trained[place]]
    if len(targets) > SCORED:
        targets = [*targets[: SCORED // 2], *targets[-SCORED // 2 :]]
    cut = max(0, min(targets[0] - 1, len(ids) - LONGEST))
    ids, targets = ids[cut : cut + LONGEST], [t - cut for t in targets if t - cut < LONGEST]
    prompt = targets[0] if targets[0] > 1 else max(1, len(ids) // 2)
    return ReplayRow(tuple(ids), prompt, tuple(t - 1 for t in targets))


def _texts(
    tuned: TunedRun, codec: TextCodec, questions: Sequence[ReplayRow]
) -> tuple[list[str], list[Conversation], TextAnswers]:
    """Returns texts, the conversations that the template accepts, and the run's results for them."""
    backend: Tokenizer = codec.tokenizer
    rows = [backend.decode(list(q.ids), skip_special_tokens=False) for q in questions]
    asked = [*TEXTS, *rows]
    rendered: list[tuple[Conversation, str]] = []
    for conversation in CONVERSATIONS if task_of(tuned.job).rows.chat else ():
        try:
            rendered.append((conversation, codec.template.render(conversation, prompt=True)))
        except TemplateRefused:
            continue  # this template accepts no system message, or not in this order
    template = codec.template.source if task_of(tuned.job).rows.chat else tuned.tokenizer.chat_template
    expected = TextAnswers(
        vocabulary_of(backend.get_vocab(with_added_tokens=True)),
        template if isinstance(template, str) else None,
        [backend.encode(text, add_special_tokens=False).ids for text in asked],
        [text for _, text in rendered],
    )
    return asked, [conversation for conversation, _ in rendered], expected
