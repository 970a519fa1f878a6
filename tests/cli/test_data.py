"""``stoker data`` on other people's data: every broken row is counted or refused with its place."""

from __future__ import annotations

import gzip
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from tokenizers import Tokenizer

from stoker.cli.main import main
from stoker.cli.output.amounts import pluralise
from stoker.data.templates.chat_template import CHATML
from stoker.terminal import escape_control_characters

JOB = "task: sft\nmodel: tiny\ndata: my.jsonl\nsteps: 10\ntrain: {seq_len: 128}\n"
POLICY = JOB.replace("sft", "grpo") + "grpo: {rewards: exact, max_tokens: 8}\n"
GOOD = [{"instruction": f"Where is number {i}?", "output": f"At {i}."} for i in range(20)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").symlink_to(model)
    write(*GOOD)
    return tmp_path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A folder with what auditing needs of a model: its tokenizer, with a template, and its configuration."""
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", chat_template=CHATML
    )
    fast.save_pretrained(folder)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaConfig(vocab_size=400, max_position_embeddings=512, **size).save_pretrained(folder)
    save_file({}, folder / "model.safetensors")  # auditing reads no weights
    return folder


def write(*rows: dict[str, Any] | str, name: str = "my.jsonl", job: str = JOB) -> None:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    Path(name).write_text("".join(f"{line}\n" for line in lines))
    Path("job.yaml").write_text(job)


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any], str]:
    code = main(["data", "job.yaml", *words, "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


def test_good_data_is_counted_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "job.yaml", "evaluate.fraction=0.1"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    counts = dict(line.split(maxsplit=2)[::2] for line in out.splitlines() if line.startswith("rows "))
    assert counts == {"rows": "0 (0.0%)"}
    lines = out.splitlines()
    assert "rows read            20" in lines
    assert "rows used            20" in lines
    assert "sequences            20, 2 of them held out" in lines
    assert "stop token           trained" in lines
    assert "trained tokens are between ⟦ and ⟧" in lines
    assert "⟦At 0.<|im_end|>⟧" in out
    assert "<|im_start|>user\nWhere is number 0?<|im_end|>\n<|im_start|>assistant\n⟦" in out
    assert out.count("--- ") == 3
    assert "\x1b" not in out


@pytest.mark.parametrize("answer", ["expected", "completion"])
def test_prompts_of_a_policy_are_not_trained(capsys: pytest.CaptureFixture[str], answer: str) -> None:
    rows = ({"prompt": f"Where is number {i}?", answer: f"At {i}."} for i in range(20))
    write(*rows, job=POLICY)
    assert main(["data", "job.yaml"]) == 0
    out = capsys.readouterr().out
    assert "trained tokens       none of the prompts, but the policy's own answers" in out.splitlines()
    assert "stop token" not in out and "⟦" not in out and out.count(" tokens, 0 trained") == 3
    assert "number 0?<|im_end|>\n<|im_start|>assistant\n\nexpected answer: At 0.\n" in out
    _, report, _ = as_json(capsys, "--packed")
    first = report["packed"][0]["documents"][0]
    assert "".join(first["tokens"]).endswith("assistant\n") and first["expected"] == f"At {first['row'] - 1}."
    assert report["prompts"] and not report["trained_tokens"] and not report["stop_token_trained"]
    assert not any(any(row["trained"]) for sequence in report["packed"] for row in sequence["documents"])


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Where is number 1?", "chosen": "At 1.", "rejected": "At 2."},
        {"prompt": "Where is number 1?", "completion": "At 2.", "label": False},
    ],
)
def test_answers_beside_the_prompts_of_a_policy_are_not_read(
    row: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    write(*[row] * 4, job=POLICY.replace("exact", '["length:5", "regex:^At"]'))
    code, report, err = as_json(capsys)
    assert (code, err, report["rows_used"], report["rows_dropped"]) == (0, "", 4, 0)
    write(*[row] * 4, job=POLICY)
    code, report, err = as_json(capsys)
    assert code == 2 and report["reasons"] == {"no expected answer, with which a reward compares": 4}
    assert "a column `expected`" in err and report["dropped"][0]["row"] == 1


def test_an_answer_at_the_end_of_a_prompt_is_shown_as_expected(capsys: pytest.CaptureFixture[str]) -> None:
    turns = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Here."}]
    write(*({"messages": turns, "answer": said} for said in ("", 7, [1, 2])), job=POLICY)
    _, report, _ = as_json(capsys)
    assert [sample["expected"] for sample in report["samples"]] == ["Here.", "7", "[1, 2]"]
    prompts = {"".join(sample["tokens"]) for sample in report["samples"]}
    assert prompts == {"<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n"}


def test_texts_have_no_prompts_for_a_policy(capsys: pytest.CaptureFixture[str]) -> None:
    write({"text": "Number 1 is at 1."}, job=POLICY)
    code, report, err = as_json(capsys)
    assert code == 2 and "job.yaml:3" in err and "texts without prompts" in err and not report["ok"]


def test_programs_get_json_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    code, report, err = as_json(capsys, "--samples", "2")
    assert (code, err) == (0, "")
    assert report["ok"] is True
    assert (report["rows_in"], report["rows_used"], report["rows_cut"], report["rows_dropped"]) == (
        20,
        20,
        0,
        0,
    )
    assert report["stop_token_trained"] is True
    assert report["dropped"] == []
    assert len(report["samples"]) == 2
    for sample in report["samples"]:
        trained = [t for t, is_trained in zip(sample["tokens"], sample["trained"], strict=True) if is_trained]
        assert "".join(trained).endswith("<|im_end|>")


BROKEN: dict[str, tuple[dict[str, Any] | str | bytes, str]] = {
    "empty output": ({"instruction": "a", "output": ""}, "empty answer"),
    "null output": ({"instruction": "a", "output": None}, "empty answer"),
    "missing output": ({"instruction": "a"}, "missing column: output"),
    "NaN": ('{"instruction": "a", "output": NaN}', "NaN in column output"),
    "not UTF-8": (b'{"instruction": "caf\xe9", "output": "b"}', "not valid UTF-8: 0xe9 at byte 21"),
    "truncated": ('{"instruction": "a", "outp', "not valid JSON"),
    "a list": ("[1, 2]", "not an object: a list"),
    "3 MB question": ({"instruction": "word " * 600_000, "output": "b"}, "nothing left to train on"),
    "NUL bytes": ("\0\0\0", "only NUL bytes"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_row_among_good_ones_is_dropped_with_its_place(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    row, reason = BROKEN[name]
    line = row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode()
    good = [json.dumps(one).encode() for one in GOOD]
    Path("my.jsonl").write_bytes(b"\n".join([*good[:12], line, *good[12:]]) + b"\n")
    code, report, err = as_json(capsys)
    assert (code, err) == (0, "")
    assert (report["rows_in"], report["rows_used"], report["rows_dropped"]) == (21, 20, 1)
    (dropped,) = report["dropped"]
    assert (Path(dropped["source"]).name, dropped["row"]) == ("my.jsonl", 13)
    assert dropped["reason"].startswith(reason)


CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "only system": ([{"role": "system", "content": "Be brief."}], "only a system message"),
    "no answer": ([{"role": "user", "content": "Hm?"}], "no assistant turn"),
    "wrong role": ([{"role": "wizard", "content": "Hm."}], "unknown role: 'wizard'"),
    "no role": ([{"content": "Hm."}], "message without role"),
    "an object": ([{"role": "user", "content": {"a": 3}}], "content is not text: an object"),
    "none": ([], "no messages"),
}


def test_an_archive_that_ends_early_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.dumps({"instruction": f"Number {n}?", "output": f"At {n * n}."}) for n in range(4000)]
    whole = gzip.compress("\n".join(rows).encode())
    Path("my.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    code, report, err = as_json(capsys, "data=my.jsonl.gz")
    assert (code, report["rows_dropped"], report["ok"]) == (2, 1, False) and report["rows_used"] < 3900
    assert f"my.jsonl.gz:{report['rows_in']}: damaged archive" in err and "more rows than this one are lost" in err
    code, report, err = as_json(capsys, "data=my.jsonl.gz", "data.max_dropped=1")
    assert (code, report["ok"], err) == (0, True, "")


def test_broken_conversations_are_each_counted(capsys: pytest.CaptureFixture[str]) -> None:
    good = [{"messages": [{"role": "user", "content": "Hm?"}, {"role": "assistant", "content": "Yes."}]}] * 5
    write(*good, *({"messages": turns} for turns, _ in CONVERSATIONS.values()))
    code, report, err = as_json(capsys)
    assert code == 2
    assert "6 of 11 rows are dropped (54.5%, at most 10.0% are allowed)" in err
    assert report["ok"] is False
    assert {d["row"]: d["reason"] for d in report["dropped"]} == {
        row: reason for row, (_, reason) in enumerate(CONVERSATIONS.values(), start=6)
    }


def test_a_table_with_missing_columns_and_cells(capsys: pytest.CaptureFixture[str]) -> None:
    table = ["instruction,output", *(f"Where is {i}?,There." for i in range(12)), "alone", ",There.", "Why?,"]
    write(*table, name="my.csv", job=JOB.replace("my.jsonl", "{path: my.csv, max_dropped: 0.5}"))
    code, report, _ = as_json(capsys)
    assert (code, report["rows_used"], report["rows_dropped"]) == (0, 12, 3)
    assert [d["row"] for d in report["dropped"]] == [14, 15, 16]
    write("colour,shape", "red,round", name="my.csv", job=JOB.replace("my.jsonl", "my.csv"))
    code, report, err = as_json(capsys)
    assert (code, err) == (2, "")
    (problem,) = report["errors"]
    assert (problem["file"], problem["line"], problem["key"]) == ("job.yaml", 3, "data[0].path")
    assert "my.csv: the columns 'colour', 'shape' fit no known format" in problem["message"]
    needed = [["instruction", "colour"], ["output", "shape"]]
    assert problem["columns"] == {"names": ["colour", "shape"], "needed": needed}


def test_the_data_of_a_stage(capsys: pytest.CaptureFixture[str]) -> None:
    stages = "  - {name: one, data: my.jsonl}\n  - name: two\n    model: {from: one}\n    data: my.csv\n"
    write("colour,shape", "red,round", name="my.csv", job=JOB.replace("data: my.jsonl\n", f"stages:\n{stages}"))
    code, report, _ = as_json(capsys, "--only", "one")
    assert (code, report["rows_used"]) == (0, 20)
    code, report, _ = as_json(capsys, "--only", "two")
    (problem,) = report["errors"]
    assert (code, problem["key"], problem["line"]) == (2, "stages[1].data[0].path", 7)
    assert problem["message"].startswith("stage two: my.csv: the columns 'colour', 'shape'") and problem["columns"]
    code, report, _ = as_json(capsys)
    assert (code, report["errors"][0]["suggestion"]) == (2, "write `--only STAGE`: one of one, two")


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([{"instruction": f"Why {i}?", "output": ""} for i in range(30)], "empty answer"),
        (["{broken"] * 30, "not valid JSON"),
        ([{"instruction": "word " * 500, "output": "Yes."}] * 30, "nothing left to train on"),
    ],
)
def test_where_every_row_is_dropped_the_report_still_comes(
    rows: list[Any], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(*rows)
    assert main(["data", "job.yaml"]) == 2
    out, err = capsys.readouterr()
    assert "rows dropped         30 (100.0%)" in out
    assert f"dropped: {reason} (30)" in out
    assert "  and 10 more" in out
    assert out.count("my.jsonl:") == 20
    assert err.startswith("error: job.yaml:3:7: my.jsonl: nothing of it would be trained")
    code, report, err = as_json(capsys)
    assert code == 2
    assert report["ok"] is False
    assert (report["rows_in"], report["rows_used"], len(report["dropped"])) == (30, 0, 30)
    assert "nothing of it would be trained" in err


def test_packed_rows_that_are_all_dropped_have_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    write({"text": ""}, job=JOB.replace("seq_len: 128", "seq_len: 128, pack: true"))
    code, report, _ = as_json(capsys, "--packed")
    assert code == 2 and report["packed"] == [] and "empty text (1)" in report["errors"][0]["message"]


def test_a_template_that_never_stops_fails_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    write(*GOOD, job=JOB.replace("my.jsonl", "{path: my.jsonl, template: mine.jinja}"))
    assert main(["data", "job.yaml"]) == 2
    out, err = capsys.readouterr()
    assert "stop token           never trained" in out
    assert "job.yaml:3:34: my.jsonl: the stop token is never trained" in err
    Path("mine.jinja").write_text("{% for %}")
    assert main(["data", "job.yaml"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "mine.jinja: the chat template is not valid Jinja" in err


def test_rows_that_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    write(*GOOD, {"instruction": "a", "output": ""})
    assert main(["data", "job.yaml", "--rows", "my.jsonl:5", "--rows", "my.jsonl:21"]) == 0
    out, _ = capsys.readouterr()
    assert "my.jsonl:21: dropped: empty answer" in out
    assert out.count("--- ") == 1
    assert "⟦At 4.<|im_end|>⟧" in out
    code, report, _ = as_json(capsys, "--rows", "my.jsonl:2")
    assert (code, [s["row"] for s in report["samples"]]) == (0, [2])
    for wrong, message in (("my.jsonl:99", "there is no such row"), ("my.jsonl", "this is not a row")):
        assert main(["data", "job.yaml", "--rows", wrong]) == 2
        assert message in capsys.readouterr().err


def test_any_of_the_scored_answers_to_a_prompt_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [f"What is {number}?" for number in range(6)]
    answers = [(prompt, answer, score) for answer, score in (("one", 1), ("two", 2)) for prompt in prompts]
    rows = [{"prompt": prompt, "answer": answer, "score": score} for prompt, answer, score in answers]
    job = JOB.replace("task: sft", "task: reward")
    write(*rows, job=job)
    first, joined = (as_json(capsys, "--rows", f"my.jsonl:{row}")[1]["samples"] for row in (2, 8))
    assert len(first) == 2 and first == joined
    assert {sample["row"] for sample in joined} == {2}


def test_scored_answers_are_found_in_their_own_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("pairs").mkdir()
    job = JOB.replace("task: sft", "task: reward").replace("my.jsonl", "pairs/*.jsonl")
    for name, count in (("a", 3), ("b", 6)):
        rows = [{"prompt": f"{name} {n}?", "answer": f"{n} by {s}", "score": s} for s in (1, 2) for n in range(count)]
        write(*rows, name=f"pairs/{name}.jsonl", job=job)
    for wanted, expected in (("b.jsonl:8", {"b:2"}), ("a.jsonl:5", {"a:2"}), ("pairs/*.jsonl:5", {"a:2", "b:5"})):
        code, report, _ = as_json(capsys, "--rows", wanted)
        found = {f"{Path(sample['source']).stem}:{sample['row']}" for sample in report["samples"]}
        assert (code, found) == (0, expected)


def test_a_module_has_no_rows(capsys: pytest.CaptureFixture[str]) -> None:
    Path("job.yaml").write_text("task: module\nsteps: 3\nmodule:\n  model: 'a:b'\n  loss: 'a:c'\n  data: 'a:d'\n")
    assert main(["data", "job.yaml"]) == 2
    assert "job.yaml:1:7: `task: module` brings its own dataset" in capsys.readouterr().err


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    code, report, err = as_json(capsys, "model=nowhere-7b")
    assert (code, err, report["ok"]) == (2, "", False)
    assert "nowhere-7b" in report["errors"][0]["message"]


def test_a_streamed_source_is_audited_whole(capsys: pytest.CaptureFixture[str]) -> None:
    write(*GOOD * 40, job=JOB.replace("my.jsonl", "{path: my.jsonl, stream: true}"))
    code, report, _ = as_json(capsys)
    assert (code, report["rows_in"], report["complete"]) == (0, 800, True)
    assert report["duplicates"] == 780


def test_what_would_steer_the_terminal_is_spelt_out(capsys: pytest.CaptureFixture[str]) -> None:
    write({"instruction": "a", "output": "red \x1b[31m bell \x07 tab\tline\nend é日\u200d"})
    assert main(["data", "job.yaml"]) == 0
    out = capsys.readouterr().out
    assert "⟦red \\x1b[31m bell \\x07 tab\tline\nend é日\u200d<|im_end|>⟧" in out
    assert escape_control_characters("\x9b\r") == "\\u009b\\x0d"


@pytest.mark.slow
def test_on_a_terminal_trained_tokens_are_coloured(folder: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "stoker", "data", "job.yaml", "--samples", "1"]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "200"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL, env=environment, cwd=folder)
    os.close(theirs)
    out = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:
            break
        if not part:
            break
        out += part
    os.close(ours)
    assert process.wait() == 0
    assert b"\x1b[1;32mAt" in out.replace(b" ", b"") or b"\x1b[1;32mA" in out
    assert "⟦" not in out.decode()
    assert b"\x1b[2m" in out


@pytest.mark.exhaustive
def test_a_real_model_on_real_conversations(capsys: pytest.CaptureFixture[str]) -> None:
    Path("job.yaml").write_text("task: sft\nmodel: smollm2-135m\ndata: chatterbot-corpus\nsteps: 10\n")
    code, report, _ = as_json(capsys)
    assert code == 0
    assert report["rows_in"] == report["rows_used"] + report["rows_dropped"] > 2000
    assert report["stop_token_trained"] is True
    assert report["prompt_not_prefix"] == report["stop_token_missing"] == 0
    assert 0.2 < report["trained_tokens"] / report["tokens"] < 0.5


def test_a_window_of_sequences_is_shown_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [sample["row"] for sample in as_json(capsys, "--samples", "20", "--offset", "0")[1]["samples"]]
    _, report, _ = as_json(capsys, "--samples", "3", "--offset", "7")
    assert [sample["row"] for sample in report["samples"]] == rows[7:10]
    assert len(as_json(capsys, "--samples", "9", "--offset", "18")[1]["samples"]) == 2
    assert as_json(capsys, "--offset", "20")[1]["samples"] == []
    special = {t for s in report["samples"] for t, is_one in zip(s["tokens"], s["special"], strict=True) if is_one}
    assert special == {"<|im_start|>", "<|im_end|>"}
    code, report, _ = as_json(capsys, "--offset", "-1")
    assert code == 2 and "--offset" in report["errors"][0]["message"]


def test_packed_sequences_are_shown_with_their_rows(capsys: pytest.CaptureFixture[str]) -> None:
    long = {"instruction": "Why?", "output": "So it is. " * 60}
    write(*GOOD, long, job=JOB.replace("seq_len: 128", "seq_len: 128, pack: true"))
    _, report, _ = as_json(capsys, "--packed", "--samples", "99", "evaluate.fraction=0")
    assert report["samples"] == [] and report["packed_sequences"] == len(report["packed"])
    rows = [row["row"] for sequence in report["packed"] for row in sequence["documents"]]
    assert sorted(rows) == list(range(1, 22)) and rows != sorted(rows)
    for number, sequence in enumerate(report["packed"]):
        assert (sequence["number"], sequence["capacity"]) == (number, 128)
        assert sequence["tokens"] == sum(len(row["ids"]) for row in sequence["documents"]) <= 128
    (cut,) = (row for sequence in report["packed"] for row in sequence["documents"] if row["lost"])
    assert cut["row"] == 21 and cut["lost"] == report["tokens_lost"] and report["rows_cut"] == 1
    _, part, _ = as_json(capsys, "--packed", "--samples", "1", "--offset", "1", "evaluate.fraction=0")
    assert part["packed"] == report["packed"][1:2]
    assert main(["data", "job.yaml", "--packed", "--samples", "99", "evaluate.fraction=0"]) == 0
    out = capsys.readouterr().out
    assert f"rows truncated       1, {cut['lost']} tokens lost" in out and f"... {cut['lost']} tokens truncated" in out
    epoch = f"an epoch has {len(report['packed'])} sequences"
    assert epoch in out
    assert main(["data", "job.yaml", "--packed", "--samples", "1", "evaluate.fraction=0"]) == 0
    assert epoch not in capsys.readouterr().out
    assert main(["data", "job.yaml", "--packed", "--offset", "99", "evaluate.fraction=0"]) == 0
    assert epoch in capsys.readouterr().out
    first = report["packed"][0]
    assert f"=== sequence 0: {len(first['documents'])} rows, {first['tokens']} of 128 tokens" in out
    code, report, _ = as_json(capsys, "--packed", "--rows", "my.jsonl:3")
    assert code == 2 and "--packed" in report["errors"][0]["message"]


def test_without_packing_a_sequence_is_a_row_in_the_order_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    _, report, _ = as_json(capsys, "--packed", "--samples", "99", "evaluate.fraction=0", "train.pack=false")
    assert report["packed_sequences"] == 20
    assert {len(sequence["documents"]) for sequence in report["packed"]} == {1}
    assert {sequence["capacity"] for sequence in report["packed"]} == {None}
    rows = [sequence["documents"][0]["row"] for sequence in report["packed"]]
    assert sorted(rows) == list(range(1, 21)) != rows


def test_one_is_singular() -> None:
    assert [pluralise(n, "token") for n in (0, 1, 2000)] == ["0 tokens", "1 token", "2,000 tokens"]
