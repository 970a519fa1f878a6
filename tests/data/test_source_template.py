"""Which chat template a source is rendered with, and what is said of one that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenised import sequences_of

from stoker.cli.main import main
from stoker.data.files.rows import Raw
from stoker.data.templates.chat_template import CHATML, ChatTemplate
from stoker.data.templates.source_template import arguments_of, with_arguments
from stoker.data.text_codec import TextCodec
from stoker.data.tokenise import RowSettings, tokenise
from stoker.errors import UserError
from stoker.job.blocks.source_block import SourceBlock, TemplateBlock
from stoker.job.load_job import load_job

CodecOf = Callable[..., TextCodec]


def chat(*turns: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]}


def source(template: str | TemplateBlock) -> SourceBlock:
    return SourceBlock(path="a", template=template)


def test_templates_by_name_and_by_file(codec: TextCodec, tmp_path: Path) -> None:
    assert codec.for_source(source("chatml"), tmp_path).template.source == CHATML
    assert codec.for_source(source("auto"), tmp_path).fingerprint == codec.fingerprint
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}")
    mine = codec.for_source(source("mine.jinja"), tmp_path)
    assert mine.template.render(chat("x")["messages"]) == "x"
    assert mine.fingerprint != codec.fingerprint


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("chatlm", None, "there is no chat template 'chatlm'; write one of auto, chatml, plain, none"),
        ("{{ x }}" * 60, None, r"there is no chat template '({{ x }}){11}{{  \.\.\.'"),
        ("bad.jinja", b"{% if %}", r"bad.jinja: the chat template is not valid Jinja.*line 1"),
        ("bad.jinja", b"\xff\xfe", "cannot be read"),
    ],
)
def test_a_wrong_template_is_the_users_to_mend(
    codec: TextCodec, tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        codec.for_source(source(name), tmp_path)


def test_the_tokenizers_own_template_may_be_wrong_too(codec_of: CodecOf, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not valid Jinja"):
        codec_of("{% for %}").for_source(source("auto"), tmp_path)


TURNS = [
    {"role": "system", "content": "Be {brief}."},
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": "Here."},
    {"role": "user", "content": "When?"},
    {"role": "assistant", "content": "Now."},
]
THINKING = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if enable_thinking is defined and enable_thinking is false %}"
    "<no>{% elif depth | default(1) > 2 %}<deep>{% endif %}{% endif %}"
)


def rendered_by_transformers(source: str, turns: list[dict[str, str]], **arguments: Any) -> str:
    """What a server makes of a template."""
    from transformers.utils.chat_template_utils import render_jinja_template

    names = {"bos_token": "<s>", "eos_token": "</s>", **arguments}
    return render_jinja_template(conversations=[turns], chat_template=source, **names)[0][0]


def test_a_text_for_each_role_is_a_template_that_serves_the_same(codec: TextCodec, tmp_path: Path) -> None:
    block = TemplateBlock(
        begin="{bos}", system="{content}\n", user='Q "{{x}}": {content}\n', assistant="A: {content}!", stop="{eos}\n"
    )
    made = codec.for_source(source(block), tmp_path).template.source
    template = ChatTemplate(made, (("bos_token", "<s>"), ("eos_token", "</s>")))
    whole = '<s>Be {brief}.\nQ "{x}": Where?\nA: Here.!</s>\nQ "{x}": When?\nA: Now.!</s>\n'
    assert template.render(TURNS) == rendered_by_transformers(made, TURNS) == whole
    asked = rendered_by_transformers(made, TURNS[:2], add_generation_prompt=True)
    assert asked == template.render(TURNS[:2], prompt=True) == '<s>Be {brief}.\nQ "{x}": Where?\nA: '
    found = template.render_trained(TURNS)
    assert [found.text[a:b] for a, b in found.spans] == ["Here.!</s>\n", "Now.!</s>\n"] and found.exact_prefix


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("{user: '{content.__class__}'}", "`data[0].template.user`: {content.__class__} is not a placeholder here"),
        ("{user: '{0}{content}'}", "{0} is not a placeholder"),
        ("{user: '{content!r}'}", "{content!r} is not a placeholder"),
        ("{user: '{content'}", "its braces do not match"),
        ("{user: 'Q:'}", "{content} must occur in it once"),
        ("{user: '{content}', stop: '{content}'}", "`data[0].template.stop`: {content} is not a placeholder"),
        ("{assistant: '{content}'}", "`user` is missing in `data[0].template`"),
        ("{user: '{content}', asistant: x}", "unknown key `data[0].template.asistant`; write `assistant`"),
        ("7", "`data[0].template` must be text or a block of keys, not 7"),
    ],
)
def test_a_wrong_text_is_named_at_its_place(
    texts: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text("{}")
    job = f"task: sft\nmodel: llama-3m\ndata:\n  path: {tmp_path}/rows.jsonl\n  template: {texts}\n"
    (tmp_path / "job.yaml").write_text(job)
    assert main(["check", str(tmp_path / "job.yaml")]) == 2
    error = capsys.readouterr().err
    assert "job.yaml:5:" in error and message in error and error.count("\n") == 1


def test_a_template_as_texts_survives_the_run_folder(tmp_path: Path) -> None:
    from stoker.job.document.job_to_yaml import dump_job

    block = {"user": "Q: {content}\n\t“x”", "stop": "{eos}\n"}
    job = {"task": "sft", "model": "llama-3m", "data": [{"path": "a", "template": block}]}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    loaded = load_job(tmp_path / "job.yaml").job
    (tmp_path / "again.yaml").write_text(dump_job(loaded))
    assert load_job(tmp_path / "again.yaml").job.data == loaded.data
    assert isinstance(loaded.data[0].template, TemplateBlock) and loaded.data[0].template.user == block["user"]


def test_arguments_reach_the_template_and_go_with_it(codec_of: CodecOf, tmp_path: Path) -> None:
    assert arguments_of(THINKING) == {"enable_thinking", "depth"} and arguments_of(CHATML) == set()
    block = SourceBlock(path="a", template_arguments={"enable_thinking": False, "depth": 3})
    codec = codec_of(THINKING).for_source(block, tmp_path)
    assert codec.template.render(TURNS[:1], prompt=True).endswith("assistant: <no>")
    made = codec.template.source
    assert rendered_by_transformers(made, TURNS[:2], add_generation_prompt=True).endswith("<no>")
    other = rendered_by_transformers(made, TURNS[:2], add_generation_prompt=True, enable_thinking=True)
    assert other.endswith("<deep>")  # a server's own value wins
    assert codec.fingerprint != codec_of(THINKING).fingerprint
    for start in ("", "\n", "  {% if true %}x{% endif %}"):  # white space at a template's start stays as it was
        given = {"depth": [1, {"a'\"\n": None, "b": True, "c": "é\\"}]}
        shown = f"{start}{{{{ depth | tojson }}}}"
        wanted = rendered_by_transformers(shown, TURNS, **given)
        assert rendered_by_transformers(with_arguments(shown, given), TURNS) == wanted


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("own.jinja", "reads no argument 'enable_thinkin'; it reads depth, enable_thinking"),
        ("chatml", "this template reads no `enable_thinkin`"),
    ],
)
def test_an_argument_that_the_template_never_reads_is_an_error(
    template: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.jinja").write_text(THINKING)
    (tmp_path / "rows.jsonl").write_text(json.dumps(chat("Where?", "Here.")))
    job = f"task: sft\nmodel: llama-3m\ndata:\n  path: rows.jsonl\n  template: {template}\n"
    (tmp_path / "job.yaml").write_text(job + "  template_arguments: {enable_thinkin: false}\n")
    assert main(["check", "job.yaml"]) == 2
    error = capsys.readouterr().err
    assert "job.yaml:6:" in error and message in error and error.count("\n") == 1


def test_everything_is_trained_where_that_is_asked_for(chatml: TextCodec) -> None:
    row = Raw("my.jsonl", 1, json.dumps({"messages": TURNS}).encode())
    settings = {"format": "messages", "columns": (), "too_long": "cut", "seq_len": 512}
    (whole,) = sequences_of(tokenise([row], chatml, RowSettings(**settings, train_on="everything")))  # type: ignore[arg-type]
    text = chatml.tokenizer.decode(whole.ids[whole.trained], skip_special_tokens=False)
    assert text == chatml.template.render(TURNS).rstrip("\n")  # the line feed behind the last stop is never written
    assert whole.stops and whole.trained[0]
    (answers,) = sequences_of(tokenise([row], chatml, RowSettings(**settings, train_on="all")))  # type: ignore[arg-type]
    assert answers.ids.tolist() == whole.ids.tolist() and answers.trained.sum() < whole.trained.sum()


def test_a_byte_order_mark_is_no_part_of_a_template(codec: TextCodec, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(CHATML, encoding="utf-8-sig")
    assert codec.for_source(SourceBlock(path="a", template="own.jinja"), tmp_path).template.source == CHATML
