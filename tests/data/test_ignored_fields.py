"""What a row gives and its text leaves out: counted by field, and dropped where an answer is lost."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from counting_origin import CountingOrigin
from tokenised import sequences_of

from stoker.data.audit import Audit, audit
from stoker.data.corpus import open_corpus
from stoker.data.files.rows import Raw
from stoker.data.text_codec import TextCodec
from stoker.data.tokenise import RowSettings, tokenise
from stoker.job import load_job

CodecOf = Callable[..., TextCodec]
HERMES = """{%- if tools %}{{- '<tools>\\n' }}{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
{{- '</tools>\\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{- '<think>' + message.reasoning_content + '</think>' }}{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}{{- '<tool_call>' + call.function | tojson + '</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
CALL_OR_CONTENT = HERMES.replace(
    "{{- message.content }}", "{%- if not message.tool_calls %}{{- message.content }}{%- endif %}"
)
FIRST_CALL = HERMES.replace("message.tool_calls or []", "(message.tool_calls or [])[:1]")
LAST_THOUGHT = HERMES.replace("if message.reasoning_content", "if message.reasoning_content and loop.last")
NO_SYSTEM = HERMES.replace(
    "{{- message.content }}", "{%- if message.role != 'system' %}{{- message.content }}{%- endif %}"
)

USER = {"role": "user", "content": "Rain?"}
YES = {"role": "assistant", "content": "Yes."}
TOOLS = [{"type": "function", "function": {"name": "weather"}}]


def calls(*cities: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "weather", "arguments": {"city": city}}} for city in cities]


def asks(content: str = "", *cities: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": calls(*cities or ("Rome",))}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def audited(codec: TextCodec, *rows: dict[str, Any], seq_len: int = 512, **source: Any) -> Audit:
    Path("my.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    block = json.dumps({"path": "my.jsonl", "max_dropped": 0.0, **source})
    Path("job.yaml").write_text(f"task: sft\nmodel: llama-3m\ndata:\n- {block}\nsteps: 10\n")
    loaded = load_job("job.yaml", [])
    return audit(open_corpus(loaded.job, codec, seq_len=seq_len, loaded=loaded), codec, loaded)


def ignored(found: Audit) -> dict[str, int]:
    assert {i.source for i in found.fields_ignored} <= {"my.jsonl"}
    assert found.as_json()["fields_ignored"] == [
        {"source": i.source, "field": i.field, "rows": i.rows} for i in found.fields_ignored
    ]
    return {i.field: i.rows for i in found.fields_ignored}


def test_fields_that_the_template_does_not_write_are_counted(chatml: TextCodec, codec_of: CodecOf) -> None:
    rows = [
        {"id": 7, "messages": [USER | {"name": "Ann"}, YES], "tools": []},
        {"id": 8, "messages": [USER | {"name": ""}, YES | {"reasoning_content": "Clouds."}], "tools": TOOLS},
        {"id": None, "messages": [USER | {"weight": 1}, YES | {"thinking": "Clouds."}], "tools": json.dumps(TOOLS)},
    ]
    wanted = {"tools": 2, "id": 2, "messages[].name": 1, "messages[].weight": 1}
    lost = {"messages[].reasoning_content": 1, "messages[].thinking": 1}
    found = audited(chatml, *rows)
    assert ignored(found) == wanted | lost
    assert not found.problems
    del wanted["tools"]
    assert ignored(audited(codec_of(HERMES), *rows)) == wanted


def test_a_row_whose_call_is_not_written_is_dropped(chatml: TextCodec, codec_of: CodecOf) -> None:
    rows = [
        {"messages": [USER, asks()], "tools": TOOLS},
        {"messages": [USER, asks("Let me look.")], "tools": TOOLS},
        {"messages": [USER, asks() | {"weight": 0}, {"role": "tool", "content": "wet"}, YES]},
        {"messages": [USER, YES]},
    ]
    found = audited(chatml, *rows)
    assert found.reasons == {"the template writes no tool calls": 2}
    assert ignored(found) == {"messages[].tool_calls": 3, "tools": 2}
    (problem,) = found.problems
    assert "the template writes no tool calls (2)" in problem.message
    assert "`data[0].template: FILE.jinja` with a chat template that writes `message.tool_calls`" in problem.suggestion
    assert "message.tool_calls" in HERMES
    found = audited(codec_of(HERMES), *rows)
    assert (found.reasons, ignored(found)) == ({}, {})


def test_a_row_is_dropped_for_content_and_calls_that_are_left_out(codec_of: CodecOf) -> None:
    found = audited(codec_of(CALL_OR_CONTENT), {"messages": [USER, asks("Let me look.")]}, {"messages": [USER, asks()]})
    assert found.reasons == {"the template omits the text of an answer": 1}
    assert ignored(found) == {"messages[].content": 1}
    found = audited(codec_of(FIRST_CALL), {"messages": [USER, asks("", "Rome", "Oslo")]}, {"messages": [USER, asks()]})
    assert found.reasons == {"the template writes no tool calls": 1}
    assert ignored(found) == {"messages[].tool_calls": 1}


def test_the_template_that_a_refusal_advises_takes_the_rows(codec_of: CodecOf) -> None:
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + NO_SYSTEM
    row = {"messages": [{"role": "system", "content": "Be brief."}, USER, YES]}
    (problem,) = audited(codec_of(refuses), row).problems
    assert "write `data[0].template: plain`" in problem.suggestion
    found = audited(codec_of(refuses), row, template="plain")
    assert (found.problems, found.reasons, ignored(found)) == ((), {}, {})


def test_reasoning_alone_is_an_answer_where_the_template_writes_it(chatml: TextCodec, codec_of: CodecOf) -> None:
    row = {"messages": [USER, {"role": "assistant", "content": [{"type": "reasoning", "value": "Clouds."}]}]}
    found = audited(chatml, row)
    assert found.reasons == {"the template writes no reasoning, and an answer has nothing else": 1}
    assert "a chat template that writes `message.reasoning_content`" in found.problems[0].suggestion
    assert "message.reasoning_content" in HERMES
    assert audited(codec_of(HERMES), row).reasons == {}


def test_reasoning_that_is_written_in_the_last_turn_alone_is_counted(codec_of: CodecOf) -> None:
    thought = YES | {"reasoning_content": "Clouds."}
    found = audited(codec_of(LAST_THOUGHT), {"messages": [USER, thought, USER, thought]}, {"messages": [USER, thought]})
    assert ignored(found) == {"messages[].reasoning_content": 1}
    assert found.reasons == {}


def test_a_system_message_that_is_not_written_is_counted_by_its_column(codec_of: CodecOf) -> None:
    system = {"role": "system", "content": "Be brief."}
    found = audited(codec_of(NO_SYSTEM), {"messages": [system, USER, YES]})
    assert ignored(found) == {"messages[].content": 1}
    found = audited(codec_of(NO_SYSTEM), {"instruction": "Rain?", "output": "Yes.", "system": "Be brief."})
    assert ignored(found) == {"system": 1}


def test_an_answer_of_which_a_part_is_left_out_is_counted(codec_of: CodecOf) -> None:
    shortens = HERMES.replace("{{- message.content }}", "{{- message.content.split('</think>')[-1] }}")
    thought = {"role": "assistant", "content": "<think>Clouds.</think>Yes."}
    assert ignored(audited(codec_of(shortens), {"messages": [USER, thought]})) == {"messages[].content (in part)": 1}
    earlier = {"messages": [USER, thought, USER, YES]}
    assert ignored(audited(codec_of(shortens), earlier)) == {"messages[].content (in part)": 1}
    assert ignored(audited(codec_of(shortens), earlier, train_on="last")) == {}  # it is not trained


def trained_texts(codec: TextCodec, row: dict[str, Any], train_on: str) -> list[str]:
    settings = RowSettings("messages", (), train_on, "cut", 512)
    batch = tokenise([Raw("my.jsonl", 1, json.dumps(row).encode())], codec, settings)
    if batch.dropped:
        return [batch.dropped[0].reason]
    (row_,) = sequences_of(batch)
    text = "".join(
        codec.tokenizer.decode([i], skip_special_tokens=False) if trained else "~"
        for i, trained in zip(row_.ids.tolist(), row_.trained.tolist(), strict=True)
    )
    return [run for run in text.split("~") if run]


@pytest.mark.parametrize("name", ["weight", "loss_weight"])
def test_a_turn_of_weight_0_is_not_trained(chatml: TextCodec, name: str) -> None:
    wrong = {"role": "assistant", "content": "No."}
    row = {"messages": [USER, wrong | {name: 0}, USER, YES | {name: 1.0}, USER, wrong | {name: False}, USER, YES]}
    yes, no = "Yes.<|im_end|>", "No.<|im_end|>"
    assert trained_texts(chatml, row, "all") == [yes, yes]
    assert trained_texts(chatml, {"messages": row["messages"][:6]}, "all") == [yes]
    assert trained_texts(chatml, {"messages": row["messages"][:6]}, "last") == [
        "every answer that would be trained has the weight 0"
    ]
    everything = "".join(trained_texts(chatml, row, "everything"))
    assert no not in everything
    assert everything.count(yes) == 2
    assert everything.count("Rain?") == 4
    silent = {"messages": [USER | {name: 0.0}, YES]}
    assert trained_texts(chatml, silent, "everything") == ["<|im_start|>assistant\nYes.<|im_end|>"]
    assert audited(chatml, silent).turns_untrained == 0  # the model's turns alone are counted
    found = audited(chatml, row)
    assert found.turns_untrained == found.as_json()["turns_untrained"] == 2
    assert ignored(found) == ignored(audited(chatml, row, train_on="everything")) == {}


def test_answers_that_a_label_calls_bad_are_trained_only_where_the_job_says_so(chatml: TextCodec) -> None:
    rows = [{"messages": [USER, YES | {"content": f"{i}."}], "label": i % 2 == 0} for i in range(10)]
    found = audited(chatml, *rows)
    assert found.formats == {"my.jsonl": "judged"}
    assert (found.rows_used, found.reasons) == (5, {"the label says that the answer is bad": 5})
    assert ignored(found) == {"label": 10}
    (problem,) = found.problems
    assert "data[0].format: judged" in problem.suggestion
    assert not audited(chatml, *rows, format="judged").problems
    found = audited(chatml, *rows, format="messages")
    assert (found.rows_used, ignored(found), found.problems) == (10, {"label": 10}, ())


def test_pairs_are_audited_and_not_trained_on_by_another_task(chatml: TextCodec) -> None:
    rows = [{"prompt": "Rain?", "chosen": f"{i}.", "rejected": "Well.", "score": i} for i in range(1, 4)]
    rows += [{"prompt": "Rain?", "chosen": "Same.", "rejected": "Same.", "score": 0}]
    found = audited(chatml, *rows, max_dropped=0.5)
    assert (found.rows_in, found.rows_used, found.sequences) == (4, 3, 6)
    assert found.reasons == {"chosen equals rejected": 1}
    assert ignored(found) == {"score": 3}
    assert [s.row for s in found.samples] == [1, 2, 3]
    (problem,) = found.problems
    assert "its rows are pairs" in problem.message
    mapped = audited(chatml, *rows, max_dropped=0.5, format="prompt", columns={"completion": "chosen"})
    assert (mapped.rows_used, mapped.problems) == (4, ())
    assert ignored(mapped) == {"rejected": 4, "score": 4}


@pytest.mark.parametrize(
    ("encoding", "name", "text"),
    [
        ("cp1252", "cp1252", "Wie heißt der Fluß in München?"),
        ("gb18030", "gb18030", "请写一首关于大海的诗。"),
        ("cp1251", "cp1251", "Где находится море?"),
    ],
)
def test_a_file_of_another_encoding_is_named_with_the_command(
    chatml: TextCodec, encoding: str, name: str, text: str
) -> None:
    Path("job.yaml").write_text("task: sft\nmodel: llama-3m\ndata: my.csv\nsteps: 10\n")
    Path("my.csv").write_text(f"instruction,output\n{text},{text}\nHi,Ho\n", encoding=encoding)
    loaded = load_job("job.yaml", [])
    (problem,) = audit(open_corpus(loaded.job, chatml, seq_len=64, loaded=loaded), chatml, loaded).problems
    assert "not valid UTF-8 (1)" in problem.message
    assert f"iconv -f {name} -t UTF-8 my.csv > new.csv" in problem.suggestion


def in_latin(place: Path) -> Path:
    place.parent.mkdir(exist_ok=True)
    row = json.dumps({"instruction": "Wie heißt er?", "output": "Groß"}, ensure_ascii=False)
    content = f"{row}\n".encode("cp1252") * 3
    place.write_bytes(gzip.compress(content) if place.suffix == ".gz" else content)
    return place


def test_the_command_names_a_file_that_was_moved_after_its_audit(chatml: TextCodec) -> None:
    def suggestion(path: Path) -> str:
        Path("job.yaml").write_text(f"task: sft\nmodel: llama-3m\ndata: {path}\nsteps: 10\n")
        loaded = load_job("job.yaml", ["data[0].format=instruction"])
        (problem,) = audit(open_corpus(loaded.job, chatml, seq_len=64, loaded=loaded), chatml, loaded).problems
        return problem.suggestion

    first = suggestion(in_latin(Path("before/my.jsonl")))
    Path("before").rename("after")
    assert suggestion(Path("after/my.jsonl")) == first
    assert "iconv -f cp1252 -t UTF-8 my.jsonl > new.jsonl" in first
    assert "iconv" not in suggestion(in_latin(Path("packed.jsonl.gz")))


def test_a_file_at_a_url_gets_the_command_too(chatml: TextCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    with CountingOrigin() as origin:
        monkeypatch.setenv("STOKER_CACHE", str(Path("cache").absolute()))
        origin.objects["my.jsonl"] = in_latin(Path("my.jsonl")).read_bytes()
        Path("job.yaml").write_text(f"task: sft\nmodel: llama-3m\ndata: {origin.url}/my.jsonl\nsteps: 10\n")
        loaded = load_job("job.yaml", ["data[0].format=instruction"])
        (problem,) = audit(open_corpus(loaded.job, chatml, seq_len=64, loaded=loaded), chatml, loaded).problems
        assert "iconv -f cp1252 -t UTF-8 my.jsonl > new.jsonl" in problem.suggestion


def test_a_prompt_longer_than_a_sequence_says_which_key_and_how_many_tokens(chatml: TextCodec) -> None:
    row = {"messages": [USER | {"content": "Rain? " * 200}, YES]}
    found = audited(chatml, row, seq_len=64)
    tokens = len(chatml.encoder.encode_one(chatml.template.render(row["messages"])))
    (problem,) = found.problems
    assert problem.suggestion == f"raise train.seq_len: the longest row has {tokens:,} tokens"
    assert found.dropped[0].reason == (
        f"nothing left to train on: its first 64 of {tokens} tokens have no answer, raise train.seq_len"
    )


def test_what_a_template_says_of_a_row_stands_in_the_summary(codec_of: CodecOf) -> None:
    refuses = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + HERMES
    )
    system = {"role": "system", "content": "Be brief."}
    found = audited(codec_of(refuses), {"messages": [system, USER, YES]}, {"messages": [USER, YES]})
    assert found.reasons == {"the chat template refuses it: System role not supported": 1}
    assert "System role not supported (1)" in found.problems[0].message


def test_a_template_that_says_something_else_of_every_row_does_not_fill_the_summary(codec_of: CodecOf) -> None:
    refuses = codec_of("{{ raise_exception('no ' + messages[0].content) }}" + HERMES)
    rows = [{"messages": [USER | {"content": f"Rain {i}?"}, YES]} for i in range(80)]
    found = audited(refuses, *rows)
    assert (len(found.reasons), sum(found.reasons.values()), found.reasons["other reasons"]) == (51, 80, 30)


def test_damage_is_found_behind_many_other_reasons(codec_of: CodecOf) -> None:
    says = "{% if 'Rain' in messages[0].content %}{{ raise_exception('no ' + messages[0].content) }}{% endif %}"
    codec = codec_of(says + HERMES)
    contents = [*(f"Rain {i}?" for i in range(80)), *(f"Sun {i * i}?" for i in range(2000))]
    rows = "".join(f"{json.dumps({'messages': [USER | {'content': text}, YES]})}\n" for text in contents)
    packed = gzip.compress(rows.encode())
    Path("my.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    Path("job.yaml").write_text("task: sft\nmodel: llama-3m\ndata: {path: my.jsonl.gz, max_dropped: 0.5}\nsteps: 10\n")
    loaded = load_job("job.yaml", [])
    found = audit(open_corpus(loaded.job, codec, seq_len=512, loaded=loaded), codec, loaded)
    assert "damaged archive" in found.problems[0].message


def test_pairs_and_turns_that_are_left_out_are_counted(chatml: TextCodec) -> None:
    turns = audited(chatml, {"messages": [USER, YES, USER]}, {"messages": [USER, YES]})
    assert ignored(turns) == {"turns after the last answer": 1}
    answers = [f"{number}" for number in range(60)]
    assert ignored(audited(chatml, {"prompt": "Rain?", "answers": answers})) == {"pairs above 1,000 of one prompt": 1}
    best = {"prompt": "Rain?", "answers": answers, "scores": [1] + [0] * 59}  # 1,770 pairs, of which 59 are no ties
    assert ignored(audited(chatml, best)) == {}
