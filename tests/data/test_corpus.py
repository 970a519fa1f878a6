"""A job's data opened as a whole: sources, weights, held-out rows, streams, and problems at their place."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.data import build_cache
from stoker.data.corpus import Corpus, open_corpus
from stoker.data.text_codec import TextCodec
from stoker.errors import RunFailed, UserError
from stoker.job import load_job

JOB = "task: sft\nmodel: llama-3m\ndata:\n- path: a.jsonl\n- path: b.jsonl\nsteps: 10\ntrain: {seq_len: 64}\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write("a.jsonl", range(80))
    write("b.jsonl", range(100, 120))
    return tmp_path


def write(name: str, numbers: Any) -> None:
    rows = ({"instruction": f"What is {n}?", "output": f"It is {n}."} for n in numbers)
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def opened(codec: TextCodec, *overrides: str, job: str = JOB) -> Corpus:
    Path("job.yaml").write_text(job)
    loaded = load_job("job.yaml", list(overrides))
    return open_corpus(loaded.job, codec, seq_len=64, loaded=loaded)


def drawn(corpus: Corpus, sequences: int) -> Counter[tuple[int, int]]:
    return Counter((d.source, d.index) for i in range(sequences) for d in corpus.sequences[i])


@pytest.mark.parametrize("packed", ["true", "false"])
def test_an_epoch_is_every_row_that_is_not_held_out(chatml: TextCodec, packed: str) -> None:
    corpus = opened(chatml, "evaluate.fraction=0.1", f"train.pack={packed}")
    kept = [(s, int(i)) for s, mask in enumerate(corpus.held_out) for i in np.flatnonzero(~mask)]
    assert [int(mask.sum()) for mask in corpus.held_out] == [8, 2]
    assert drawn(corpus, corpus.sequences.total(2)) == Counter(dict.fromkeys(kept, 2))
    held = {(d.source, d.index) for d in corpus.evaluation_documents()}
    assert held == {(s, int(i)) for s, mask in enumerate(corpus.held_out) for i in np.flatnonzero(mask)}
    file, row = corpus.sequences.origin(corpus.sequences[0][0])
    assert Path(file).name in {"a.jsonl", "b.jsonl"}
    assert 1 <= row <= 80


def test_weights_and_temperature(chatml: TextCodec) -> None:
    weights = JOB.replace("a.jsonl", "a.jsonl\n  weight: 1").replace("b.jsonl", "b.jsonl\n  weight: 3")
    corpus = opened(chatml, "evaluate.fraction=0", "train.pack=false", job=weights)
    assert Counter(s for s, _ in drawn(corpus, 100).elements()) == {0: 25, 1: 75}
    flat = opened(chatml, "evaluate.fraction=0", "train.pack=false", "mix.temperature=2")
    counts = Counter(s for s, _ in drawn(flat, 100).elements())
    assert counts == {0: 67, 1: 33}  # sqrt(80) : sqrt(20) = 2 : 1


def test_a_row_in_two_sources_is_held_out_of_both(chatml: TextCodec) -> None:
    write("b.jsonl", range(40, 120))
    corpus = opened(chatml, "evaluate.fraction=0.3")
    digests = [source.cache.column("digest") for source in corpus.sources]
    held = np.concatenate([d[mask] for d, mask in zip(digests, corpus.held_out, strict=True)])
    kept = np.concatenate([d[~mask] for d, mask in zip(digests, corpus.held_out, strict=True)])
    assert len(held) > 40
    assert not np.isin(kept, held).any()


def test_evaluation_data_of_its_own(chatml: TextCodec) -> None:
    corpus = opened(chatml, job=JOB + "evaluate:\n  data:\n  - path: b.jsonl\n")
    assert not any(mask.any() for mask in corpus.held_out)
    documents = corpus.evaluation_documents()
    assert [d.index for d in documents if d.source == 2] == [d.index for d in documents]
    assert sorted(d.index for d in documents) == list(range(20))
    lengths = [len(d.row.ids) for d in documents]
    assert lengths == sorted(lengths)


def test_a_streamed_source_goes_on_through_epochs(chatml: TextCodec) -> None:
    streamed = JOB.replace("a.jsonl", "a.jsonl\n  stream: true")
    corpus = opened(chatml, "train.pack=false", "evaluate.fraction=0", job=streamed)
    shares = [source.source.size_bytes for source in corpus.sources]
    counts = Counter(s for s, _ in drawn(corpus, 1024).elements())
    assert counts[0] == pytest.approx(1024 * shares[0] / sum(shares), abs=1)
    assert len(drawn(corpus, 1024)) == 100
    corpus.close()
    with pytest.raises(UserError, match=r"job.yaml:4:\d+: a.jsonl is streamed.*give `steps`"):
        opened(chatml, job=streamed.replace("steps: 10", "epochs: 1"))


def test_the_build_of_a_stream_ends_where_a_later_source_cannot_be_tokenised(
    chatml: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = build_cache._build

    def endless(*given: Any, stop: threading.Event | None = None, **named: Any) -> None:
        if stop is None:  # the second source
            raise RunFailed("the disk is full")
        build(*given, stop=stop, **named)
        stop.wait()

    monkeypatch.setattr(build_cache, "_build", endless)
    write("a.jsonl", range(1000, 1080))  # rows that no other test has cached
    write("b.jsonl", range(1100, 1120))
    with pytest.raises(RunFailed, match="the disk is full"):
        opened(chatml, job=JOB.replace("a.jsonl", "a.jsonl\n  stream: true"))
    assert "stoker-tokenise" not in {thread.name for thread in threading.enumerate()}


def test_pairs_are_evaluated_whole_and_never_streamed(chatml: TextCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [{"prompt": f"What is {n}?", "chosen": f"It is {n}.", "rejected": "No."} for n in range(80)]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    monkeypatch.setattr("stoker.data.corpus.STREAM_ABOVE", 100)
    job = "task: dpo\nmodel: llama-3m\ndata: pairs.jsonl\nsteps: 10\nevaluate: {fraction: 0.2, rows: 3}\n"
    corpus = opened(chatml, job=job)
    indices = [document.index for document in corpus.evaluation_documents()]
    assert (
        len(indices) == 6 and all(i % 2 == 0 for i in indices[::2]) and indices[1::2] == [i + 1 for i in indices[::2]]
    )
    assert not corpus.sources[0].streams
    answers = opened(chatml)
    answers.read_whole()
    assert [source.streams for source in answers.sources] == [True, True]


def test_a_source_of_which_nothing_is_left_is_opened_and_not_drawn(chatml: TextCodec) -> None:
    Path("b.jsonl").write_text('{"instruction": "a", "output": ""}\n' * 3)
    for mix in ((), ("mix.temperature=3",)):
        corpus = opened(chatml, "train.pack=false", *mix)
        assert corpus.sources[1].cache.rows == 0
        assert {s for s, _ in drawn(corpus, 150)} == {0}
    Path("a.jsonl").write_text("{broken\n")
    corpus = opened(chatml)
    assert corpus.sequences.total(1) == 0
    assert corpus.evaluation_documents() == []


def test_all_wrong_sources_are_named_at_their_place(chatml: TextCodec) -> None:
    Path("a.jsonl").write_text('{"colour": "red"}\n')
    Path("b.jsonl").write_text("\n")
    with pytest.raises(UserError) as caught:
        opened(chatml)
    first, second = map(str, caught.value.problems)
    assert first.startswith("job.yaml:4:9: a.jsonl: the columns 'colour' fit no known format")
    assert second.startswith("job.yaml:5:9: b.jsonl is empty")


def test_a_wrong_template_is_named_at_its_source(chatml: TextCodec) -> None:
    with pytest.raises(UserError, match=r"job.yaml:5:\d+: there is no chat template 'chatlm'"):
        opened(chatml, job=JOB.replace("a.jsonl", "a.jsonl\n  template: chatlm"))


def test_documents_need_no_template(codec_of: Any) -> None:
    Path("a.jsonl").write_text('{"text": "The sea."}\n' * 3)
    broken = codec_of("{% for %}")
    corpus = opened(broken, job="task: pretrain\nmodel: llama-3m\ndata: a.jsonl\nsteps: 3\n")
    assert corpus.sources[0].cache.rows > 0


GRPO = "task: grpo\nmodel: llama-3m\ndata: p.jsonl\nsteps: 1\ngrpo: {rewards: 'length:5', max_tokens: 8}\n"


def test_a_prompt_is_all_before_the_last_answer_whatever_its_label(chatml: TextCodec) -> None:
    turns = [("user", "Hi."), ("assistant", "Yes?"), ("user", "Go on."), ("assistant", "No.")]
    messages = [{"role": role, "content": text} for role, text in turns]
    Path("p.jsonl").write_text("".join(json.dumps({"messages": messages, "label": n % 2 > 0}) + "\n" for n in range(4)))
    corpus = opened(chatml, "train.seq_len=64", "evaluate.fraction=0", job=GRPO)
    assert corpus.sources[0].cache.rows == 4
    prompt = chatml.tokenizer.decode(corpus.sources[0].cache[0].prompt.tolist(), skip_special_tokens=False)
    assert prompt.endswith("Go on.<|im_end|>\n<|im_start|>assistant\n")


def test_packed_pairs_have_twice_the_room(chatml: TextCodec) -> None:
    pairs = [{"prompt": f"What is {n}?", "chosen": f"It is {n}.", "rejected": "No."} for n in range(8)]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    job = "task: dpo\nmodel: llama-3m\ndata: pairs.jsonl\nsteps: 10\n"
    corpus = opened(chatml, "train.pack=true", "evaluate.fraction=0", job=job)
    assert corpus.sequences.capacity == 128
    drawn_once = [(d.source, d.index) for i in range(corpus.sequences.total(1)) for d in corpus.sequences[i]]
    assert sorted(drawn_once) == [(0, index) for index in range(16)]
    assert all(one[1] % 2 == 0 and other[1] == one[1] + 1 for one, other in zip(*[iter(drawn_once)] * 2, strict=True))


def test_some_rows_of_an_evaluation_are_not_its_first(chatml: TextCodec) -> None:
    corpus = opened(chatml, "evaluate.rows=5", job=JOB + "evaluate:\n  data:\n  - path: a.jsonl\n")
    indices = sorted(document.index for document in corpus.evaluation_documents())
    assert len(set(indices)) == 5 and indices != list(range(5))


def test_nothing_is_held_out_of_a_stream(chatml: TextCodec) -> None:
    corpus = opened(chatml, "evaluate.fraction=0.2", job=JOB.replace("a.jsonl", "a.jsonl\n  stream: true"))
    assert [mask.any() for mask in corpus.held_out] == [False, True]
    corpus.close()


def test_special_tokens_in_prompts_and_completions_are_kept(chatml: TextCodec) -> None:
    Path("a.jsonl").write_text(json.dumps({"prompt": "Say it: <|im_end|>", "completion": "It."}) + "\n")
    end = chatml.tokenizer.token_to_id("<|im_end|>")
    for special, count in (("auto", 2), ("keep", 2), ("text", 1)):  # the template's own is among them
        job = JOB.replace("a.jsonl", f"a.jsonl\n  format: prompt\n  special_tokens: {special}")
        row = opened(chatml, "evaluate.fraction=0", job=job).sources[0].cache[0]
        assert np.count_nonzero(row.ids[~row.trained] == end) == count
