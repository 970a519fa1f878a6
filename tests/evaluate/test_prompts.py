"""Templates over the same rows: the planted best one is named and written, and none where the rows cannot tell."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from evaluation_rows import write_lines

from stoker.cli.main import main
from stoker.data.templates.chat_template import ChatTemplate
from stoker.data.templates.template_environment import TemplateRefused
from stoker.evaluate.compare_prompts import rank
from stoker.evaluate.intervals import paired_difference
from stoker.evaluate.prompt_templates import PromptTemplate, as_chat_template
from stoker.evaluate.scored_answers import ScoredAnswer
from stoker.generate.open_model import open_model
from stoker.scoring.answer_rows import AnswerRow
from stoker.scoring.scorer import Score


def scored(values: list[float]) -> list[ScoredAnswer]:
    row = AnswerRow("rows.jsonl", 1, (), "x", (), {})
    return [ScoredAnswer(row, (), "", "stop", {"exact": Score(value)}) for value in values]


def test_the_best_is_named_only_where_the_interval_says_so() -> None:
    high, low = [1.0] * 15 + [0.0] * 5, [0.0] * 20
    assert rank({"a": scored(low), "b": scored(high)}, "exact", seed=0).best == "b"  # type: ignore[union-attr]
    nearly = [1.0] * 14 + [0.0] * 5 + [1.0]
    unclear = rank({"a": scored(high), "b": scored(nearly), "c": scored(low)}, "exact", seed=0)
    assert unclear is not None and unclear.best is None
    assert not unclear.behind["b"].excludes_zero and unclear.behind["c"].excludes_zero
    # Three templates have three pairs, of which any may have come out best.
    assert unclear.behind["c"] == paired_difference(high, low, seed=0, confidence=1 - 0.05 / 3)
    for rows in (9, 10):
        few = rank({"a": scored([1.0] * rows), "b": scored([0.0] * rows)}, "exact", seed=0)
        assert few is not None and few.best == ("a" if rows == 10 else None)


def test_rows_without_a_clear_verdict_on_a_template_rank_none() -> None:
    answers = {"a": scored([1.0, 0.5, 1.0, 0.0]), "b": scored([0.0, 1.0, 0.0, 1.0])}
    for name, row in (("a", 1), ("b", 3)):
        unclear = {"exact": replace(answers[name][row].scores["exact"], counts=False)}
        answers[name][row] = replace(answers[name][row], scores=unclear)
    found = rank(answers, "exact", seed=0)
    assert found is not None and found.order == ("a", "b")
    assert (found.behind["b"].value, found.behind["b"].rows) == (1.0, 2)
    unclear_only = [replace(a, scores={"exact": Score(0.5, counts=False)}) for a in answers["a"]]
    assert rank({**answers, "c": unclear_only}, "exact", seed=0) == found
    assert rank({"a": answers["a"], "c": unclear_only}, "exact", seed=0) is None


@pytest.mark.parametrize("system", ["", "Be brief {question}"])
def test_the_written_template_asks_what_was_asked(base: Path, system: str) -> None:
    model = open_model("tiny", base)
    template = PromptTemplate("t", 'Q: {{"x"}} {question}\n', system)
    row = AnswerRow("rows.jsonl", 1, (), None, (), {"question": "Why 'so'?\n{{ 7 }}"})
    asked = model.codec.template.render(template.fill(row), prompt=True)
    written = ChatTemplate(as_chat_template(template, model), model.codec.template.special_tokens)
    turns = [{"role": "user", "content": row.fields["question"]}]
    assert written.render(turns, prompt=True) == asked


def test_several_variables_are_fields_of_the_turn(base: Path) -> None:
    model = open_model("tiny", base)
    template = PromptTemplate("t", "{context}: {prompt}")
    fields = {"prompt": "Why?", "context": "It rains"}
    asked = model.codec.template.render(template.fill(AnswerRow("r", 1, (), None, (), fields)), prompt=True)
    written = ChatTemplate(as_chat_template(template, model), model.codec.template.special_tokens)
    assert written.render([{"role": "user", "content": "Why?", "context": "It rains"}], prompt=True) == asked


def test_the_planted_template_wins_and_a_job_takes_it(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.yaml").write_text('bare: "{prompt}"\nnoise: "is is is {prompt} is"\n')
    words = ["--prompts", str(tmp_path / "prompts.yaml"), "--score", "exact", "--max-tokens", "20"]
    best = tmp_path / "best.jinja"
    assert main(["eval", "good", "--answers", "asked.jsonl", *words, "--best", str(best), "--json"]) == 0
    out, err = capsys.readouterr()
    assert [f"{name}: answered 12 of 12 rows; scoring ..." in err for name in ("bare", "noise")] == [True, True]
    found = json.loads(out)
    assert found["details"]["best"] == "bare" and found["details"]["written"] == str(best)
    assert {f["of"]: f["value"] for f in found["figures"]}["bare"] == 1
    (tmp_path / "job.yaml").write_text(
        f"task: sft\nmodel: {here}/tiny\ndata: {{path: {here}/rows.jsonl, template: {best}}}\ntune: lora\nsteps: 1\n"
    )
    assert main(["data", str(tmp_path / "job.yaml"), "--json"]) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: '{prompt}'", "does not hold several templates"),
        ("a: '{prompt}'\nb: 3", "b is not a template"),
        ("a: '{prompt}'\nb: text", "b reads no column"),
        ("a: '{prompt}'\nb: '{prompt'", "b: "),
        ("a: '{prompt}'\nb: '{prompt.x}'", "not a plain name"),
        ("a: '{prompt}'\nb: '{other}'", "asked.jsonl:1: the template b reads {other}"),
        ("a: [", "prompts.yaml cannot be read"),
    ],
)
def test_bad_templates_are_one_clear_error(
    content: str, message: str, here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.yaml").write_text(content)
    asked = write_lines(tmp_path / "asked.jsonl", [{"prompt": "How?", "expected": "x"}])
    assert main(["eval", "good", "--answers", str(asked), "--prompts", str(tmp_path / "prompts.yaml")]) == 2
    assert message in capsys.readouterr().err


def test_a_turn_without_a_field_of_the_template_is_refused(base: Path) -> None:
    model = open_model("tiny", base)
    template = PromptTemplate("t", "{context}: {prompt}", "Use {context}")
    written = ChatTemplate(as_chat_template(template, model), model.codec.template.special_tokens)
    turn = {"role": "user", "content": "Why?"}
    with pytest.raises(TemplateRefused, match="a user turn has no field context"):
        written.render([turn], prompt=True)
    assert "It rains: Why?" in written.render([turn | {"context": "It rains"}], prompt=True)
