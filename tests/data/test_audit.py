"""The audit against counts made by hand, and the gate against data that must not pass."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from stoker.data import dropped_rows
from stoker.data.audit import Audit, audit
from stoker.data.corpus import open_corpus
from stoker.data.dropped_rows import DroppedRows
from stoker.data.files.rows import Rejected
from stoker.data.sample_preview import samples_of, sequences_from, token_texts
from stoker.data.text_codec import TextCodec
from stoker.job import LoadedJob, load_job

CodecOf = Callable[..., TextCodec]
JOB = "task: sft\nmodel: llama-3m\ndata: my.jsonl\nsteps: 10\ntrain: {seq_len: 64}\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(*rows: dict[str, Any] | str, name: str = "my.jsonl") -> None:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    Path(name).write_text("".join(f"{line}\n" for line in lines))


def qa(question: str, answer: str) -> dict[str, Any]:
    return {"instruction": question, "output": answer}


def job_of(*overrides: str) -> LoadedJob:
    Path("job.yaml").write_text(JOB)
    return load_job("job.yaml", list(overrides))


def audited(codec: TextCodec, *overrides: str, job: str = JOB, samples: int = 3) -> Audit:
    Path("job.yaml").write_text(job)
    loaded = load_job("job.yaml", list(overrides))
    return audit(open_corpus(loaded.job, codec, seq_len=64, loaded=loaded), codec, loaded, samples)


def test_every_row_is_counted_once(chatml: TextCodec) -> None:
    write(
        *(qa(f"Is {i} even?", "Yes." if i % 2 else "No.") for i in range(40)),
        qa("Is 1 even?", "Yes."),
        qa("", "a"),
    )
    found = audited(chatml, "evaluate.fraction=0.1", "data[0].max_dropped=0.5")
    assert (found.rows_in, found.rows_used, found.rows_dropped) == (42, 41, 1)
    assert found.reasons == {"empty instruction": 1}
    assert [(Path(d.source).name, d.row) for d in found.dropped] == [("my.jsonl", 42)]
    assert (found.rows_cut, found.rows_split, found.duplicates, found.held_out, found.overlap) == (
        0,
        0,
        1,
        4,
        0,
    )
    ids = [chatml.tokenizer.encode(row, add_special_tokens=False).ids for row in rendered(chatml)]
    assert found.tokens == sum(map(len, ids))
    answers = [
        chatml.tokenizer.encode(text, add_special_tokens=False).ids for text in ("Yes.<|im_end|>", "No.<|im_end|>")
    ]
    assert found.trained_tokens == 21 * len(answers[0]) + 20 * len(answers[1])
    assert found.longest == max(map(len, ids))
    assert found.mean == pytest.approx(sum(map(len, ids)) / 41)
    assert found.stop_token_trained
    assert (found.stop_missing, found.prompt_not_prefix) == (0, 0)
    assert sum(found.length_histogram.values()) == found.sequences == 41
    assert all(any(bound / 2 < len(i) <= bound for i in ids) for bound in found.length_histogram)
    assert not found.problems
    assert found.complete


def rendered(codec: TextCodec) -> list[str]:
    rows = [json.loads(line) for line in Path("my.jsonl").read_text().splitlines()]
    turns = [(("user", r["instruction"]), ("assistant", r["output"])) for r in rows if r["instruction"]]
    return [codec.template.render([{"role": role, "content": text} for role, text in pair]) for pair in turns]


def test_the_report_for_programs_keeps_its_keys(chatml: TextCodec) -> None:
    write(qa("Is it?", "Yes."), "{broken")
    found = audited(chatml)
    report = json.loads(json.dumps(found.as_json()))
    assert report["ok"] is False
    assert report["dropped"][0]["row"] == 2
    assert set(report["dropped"][0]) == {"source", "row", "reason"}
    promised = "rows_in rows_used rows_cut rows_dropped dropped tokens trained_tokens stop_token_trained duplicates"
    assert {*promised.split(), "length_histogram", "samples"} <= set(report)
    sample = report["samples"][0]
    assert len(sample["tokens"]) == len(sample["trained"]) == len(sample["ids"])
    assert (
        "".join(t for t, trained in zip(sample["tokens"], sample["trained"], strict=True) if trained)
        == "Yes.<|im_end|>"
    )


def test_an_answer_with_both_labels_is_counted(chatml: TextCodec) -> None:
    labelled = [("Yes", 1), ("No", 0), ("No", 1), ("Yes", 1), ("Never", 0)]
    write(*({"prompt": "Is 1 even?", "completion": answer, "label": label} for answer, label in labelled))
    found = audited(chatml, "dpo.loss=kto", job=JOB.replace("sft", "dpo"))
    assert (found.rows_used, found.duplicates, found.contradictions) == (5, 2, 1)


def test_overlap_with_evaluation_data(chatml: TextCodec) -> None:
    write(*(qa(f"Is {i}?", "Yes.") for i in range(9)))
    write(qa("Is 3?", "Yes."), qa("Is 3?", "No."), qa("Is 4?", "Yes."), "{", name="held.jsonl")
    more = JOB + "evaluate:\n  data:\n  - path: held.jsonl\n    max_dropped: 0.5\n"
    found = audited(chatml, job=more)
    assert found.overlap == 2
    assert found.evaluation_rows == (4, 1)
    assert not found.problems


def test_nothing_to_train_on_is_refused_with_the_reasons(chatml: TextCodec) -> None:
    write(qa("a", ""), qa("", "b"), "{broken", '"text"')
    found = audited(chatml)
    (problem,) = found.problems
    assert (found.rows_in, found.rows_used, found.rows_dropped, found.tokens) == (4, 0, 4, 0)
    assert sum(found.reasons.values()) == 4
    assert str(problem).startswith("job.yaml:3:7: my.jsonl: nothing of it would be trained, all of its 4 rows")
    assert found.samples == ()
    assert found.length_histogram == {}


def test_too_many_dropped_rows_are_refused(chatml: TextCodec) -> None:
    write(*(qa(f"Is {i}?", "Yes." if i > 1 else "") for i in range(10)))
    (problem,) = audited(chatml).problems
    assert "2 of 10 rows are dropped (20.0%, at most 10.0% are allowed): empty answer (2)" in problem.message
    assert not audited(chatml, "data[0].max_dropped=0.2").problems


def test_a_template_that_never_stops_is_refused(codec_of: CodecOf) -> None:
    write(qa("Is it?", "Yes."))
    endless = codec_of("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}")
    found = audited(endless)
    (problem,) = found.problems
    assert not found.stop_token_trained
    assert found.stop_missing == 1
    assert "the stop token is never trained" in problem.message
    assert "template: plain" in problem.suggestion
    assert not audited(endless, job=JOB.replace("data: my.jsonl", "data: {path: my.jsonl, template: plain}")).problems


def test_rows_that_are_all_cut_before_they_stop_are_refused(chatml: TextCodec) -> None:
    write(qa("Is it?", "Yes. " * 60))
    found = audited(chatml, job=JOB.replace("my.jsonl", "{path: my.jsonl, too_long: cut}"))
    (problem,) = found.problems
    assert "raise train.seq_len" in problem.suggestion
    assert (found.rows_cut, found.stop_missing) == (1, 0)
    split = audited(chatml, job=JOB.replace("my.jsonl", "{path: my.jsonl, too_long: split}"))
    assert not split.problems
    assert (split.rows_cut, split.rows_split, split.stop_missing) == (0, 1, 0)
    assert split.sequences > 1


def test_evaluation_data_of_which_nothing_is_left_is_refused(chatml: TextCodec) -> None:
    write(qa("Is it?", "Yes."))
    write("{", name="held.jsonl")
    (problem,) = audited(chatml, job=JOB + "evaluate:\n  data:\n  - path: held.jsonl\n").problems
    assert str(problem).startswith("job.yaml:8:")
    assert "held.jsonl: nothing of it would be trained" in problem.message


def test_prompts_that_are_no_prefix_are_counted(codec_of: CodecOf) -> None:
    write(qa("Is it?", "Yes."), qa("Is it not?", "No."))
    thinking = (
        "{% for m in messages %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}"
        "{{ 'assistant:<think>' if add_generation_prompt }}"
    )
    assert audited(codec_of(thinking)).prompt_not_prefix == 2


def test_samples_are_spread_and_rows_can_be_asked_for(chatml: TextCodec) -> None:
    write(*(qa(f"Is {i}?", f"Yes {i}.") for i in range(30)), qa("x", ""))
    found = audited(chatml, samples=4)
    assert [sample.row for sample in found.samples] == [1, 10, 20, 30]
    assert audited(chatml, samples=0).samples == ()
    Path("job.yaml").write_text(JOB)
    loaded = load_job("job.yaml")
    corpus = open_corpus(loaded.job, chatml, seq_len=64)
    for name in ("my.jsonl", str(Path("my.jsonl").absolute())):
        (sample,), dropped = samples_of(corpus, chatml, name, 7)
        assert dropped == []
        assert "Yes 6." in "".join(sample.tokens)
    assert [d.reason for d in samples_of(corpus, chatml, "my.jsonl", 31)[1]] == ["empty answer"]
    assert samples_of(corpus, chatml, "my.jsonl", 32) == ([], [])
    assert samples_of(corpus, chatml, "y.jsonl", 7) == ([], [])


TEXTS = [
    "Hello there, you.",
    " leading",
    "日本 👩\u200d👧 e\u0301 \ufffd!",
    "<|im_start|>a\n<|im_end|>",
    "",
    "a\ufffd\ufffdb",
]


@pytest.mark.parametrize("text", TEXTS)
def test_the_texts_of_tokens_are_together_the_text(chatml: TextCodec, text: str) -> None:
    ids = chatml.tokenizer.encode(text, add_special_tokens=False).ids
    texts = token_texts(chatml, ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == text


def test_spaces_that_a_decoder_drops_are_kept_between_tokens(codec_of: CodecOf) -> None:
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁the", -1.0), ("▁sea", -1.0), ("s", -2.0)], 0, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens(["<|im_end|>", "<|im_start|>"])
    codec = codec_of("none", own=tokenizer)
    ids = tokenizer.encode("the sea seas").ids
    assert token_texts(codec, ids) == ("the", " sea", " sea", "s")


def test_shown_sequences_are_packed_as_training_packs_them(chatml: TextCodec) -> None:
    write(*(qa(f"Is {i}?", "Yes. " * (1 + i % 3)) for i in range(40)), qa("Why?", "So. " * 40))
    Path("job.yaml").write_text(JOB.replace("seq_len: 64", "seq_len: 64, pack: true"))
    loaded = load_job("job.yaml")
    corpus = open_corpus(loaded.job, chatml, seq_len=64, loaded=loaded)
    shown, total = sequences_from(corpus, chatml, 0, 1000)
    assert total == len(shown) == corpus.sequences.total(1.0) > 3
    for sequence in shown:
        trained_on = corpus.sequences[sequence.number]
        assert [list(each.ids) for each in sequence.documents] == [each.row.ids.tolist() for each in trained_on]
        assert [(each.source, each.row) for each in sequence.documents] == [
            corpus.sequences.origin(each) for each in trained_on
        ]
        assert sequence.tokens <= (sequence.capacity or 0) == 64
    rows = sorted(each.row for sequence in shown for each in sequence.documents)
    held_out = int(corpus.held_out[0].sum())
    assert len(rows) == len(set(rows)) == 41 - held_out
    assert max(len(sequence.documents) for sequence in shown) > 1
    window, _ = sequences_from(corpus, chatml, 2, 2)
    assert window == shown[2:4]
    assert sequences_from(corpus, chatml, total, 5) == ([], total)


def test_a_cut_row_says_how_much_is_lost(chatml: TextCodec) -> None:
    write(qa("Is it?", "Yes."), qa("Why?", "So. " * 40))
    whole, cut = (
        audit(open_corpus(loaded.job, chatml, seq_len=length, loaded=loaded), chatml, loaded, 2)
        for length in (512, 64)
        if (loaded := job_of(f"train.seq_len={length}"))
    )
    long = whole.samples[1]
    assert len(long.ids) > 64 and whole.tokens_lost == 0
    assert [sample.lost for sample in cut.samples] == [0, len(long.ids) - 64]
    assert cut.samples[1].ids == long.ids[:64] and cut.tokens_lost == len(long.ids) - 64
    assert cut.tokens + cut.tokens_lost == whole.tokens


def test_rows_that_go_on_say_so(chatml: TextCodec) -> None:
    write({"text": "The sea is blue and the wind is cold. " * 8})
    job = JOB.replace("task: sft", "task: pretrain")
    found = audited(chatml, "evaluate.fraction=0", job=job, samples=9)
    assert len(found.samples) > 1 and found.tokens_lost == 0
    assert [sample.continues for sample in found.samples] == [True] * (len(found.samples) - 1) + [False]


def test_many_dropped_rows_are_counted_and_the_first_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropped_rows, "KEPT", 3)
    one, other = DroppedRows(), DroppedRows()
    for number in range(1, 3):
        one.add(Rejected("a", number, "empty answer"))
    for number in range(1, 6):
        other.add(Rejected("b", number, "not JSON: at 3"))
    one.join(other)
    assert one.reasons == {"empty answer": 2, "not JSON": 5}
    assert [(row.source, row.row) for row in one.first] == [("a", 1), ("a", 2), ("b", 1)]
    assert len(other.first) == 3


JUDGED = [{"prompt": f"Is {n} even?", "completion": "Yes.", "label": n % 2 == 0} for n in range(10)]


def test_bad_answers_may_be_left_out_on_purpose(chatml: TextCodec) -> None:
    write(*JUDGED)
    (problem,) = audited(chatml).problems
    assert "5 of 10 rows are dropped" in problem.message and "data[0].format: judged" in problem.suggestion
    stated = JOB.replace("my.jsonl", "{path: my.jsonl, format: judged}")
    found = audited(chatml, job=stated)
    assert not found.problems and (found.rows_used, found.rows_dropped) == (5, 5)
    write(*JUDGED, *({"prompt": "", "completion": "No.", "label": True} for _ in range(5)))
    (problem,) = audited(chatml, job=stated).problems
    assert "5 of 15 rows are dropped" in problem.message


def test_one_cut_row_does_not_excuse_a_template_that_never_stops(codec_of: CodecOf) -> None:
    write(qa("Is it?", "Yes."), qa("Is it?", "Yes. " * 60))
    endless = codec_of("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}")
    (problem,) = audited(endless, job=JOB.replace("my.jsonl", "{path: my.jsonl, too_long: cut}")).problems
    assert "template: plain" in problem.suggestion and "raise train.seq_len" not in problem.suggestion


def test_rows_of_another_kind_are_refused(chatml: TextCodec) -> None:
    write({"prompt": "Is it?", "chosen": "Yes.", "rejected": "No."})
    (problem,) = audited(chatml).problems
    assert "its rows are pairs, chosen and rejected; task sft trains on one answer a row" in problem.message
    write({"text": "The sea is blue."})
    grpo = "task: grpo\nmodel: llama-3m\ndata: my.jsonl\nsteps: 1\ngrpo: {rewards: 'length:5', max_tokens: 8}\n"
    assert any(
        "its rows are texts without prompts" in problem.message for problem in audited(chatml, job=grpo).problems
    )
    write({"prompt": "Is it?"})
    found = audited(chatml, "evaluate.fraction=0", job=grpo)
    assert not found.problems and (found.trained_tokens, found.stop_missing, found.stop_token_trained) == (0, 0, False)


def test_a_damaged_file_is_refused_however_few_rows_are_lost(chatml: TextCodec) -> None:
    packed = gzip.compress("".join(json.dumps(qa(f"Is {n}?", "Yes.")) + "\n" for n in range(2000)).encode())
    Path("my.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    (problem,) = audited(chatml, job=JOB.replace("my.jsonl", "my.jsonl.gz")).problems
    assert "my.jsonl.gz:" in problem.message and "more rows than this one are lost" in problem.message


def test_rows_in_several_sequences_are_counted_once(codec_of: CodecOf) -> None:
    thinking = (
        "{% for m in messages %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}"
        "{{ 'assistant:<think>' if add_generation_prompt }}"
    )
    write(qa("Is it?", "Yes. " * 60), qa("Is it not?", "No."))
    found = audited(codec_of(thinking), job=JOB.replace("my.jsonl", "{path: my.jsonl, too_long: split}"))
    assert found.sequences > 2 and (found.rows_used, found.rows_split, found.prompt_not_prefix) == (2, 1, 2)


def test_turns_without_a_weight_and_ignored_fields_are_counted(chatml: TextCodec) -> None:
    turns = [("user", "Hi.", 1), ("assistant", "Yes?", 0), ("user", "Go on.", 1), ("assistant", "No.", 1)]
    messages = [{"role": role, "content": text, "weight": weight} for role, text, weight in turns]
    write(*({"messages": messages} for _ in range(3)))
    write({**qa("Is 3?", "Yes."), "topic": "numbers"}, name="held.jsonl")
    found = audited(chatml, job=JOB + "evaluate:\n  data:\n  - path: held.jsonl\n")
    assert found.turns_untrained == 3
    assert ("held.jsonl", "topic", 1) in [(one.source, one.field, one.rows) for one in found.fields_ignored]


def test_the_token_that_ends_all_answers_is_suggested_as_the_stop_token(codec_of: CodecOf) -> None:
    write(qa("Is it?", "Yes."))
    other = codec_of("{% for m in messages %}{{ m.role + ': ' + m.content + '<|endoftext|>\n' }}{% endfor %}")
    (problem,) = audited(other).problems
    assert "its answers end with <|endoftext|>: write model.stop: " in problem.suggestion
