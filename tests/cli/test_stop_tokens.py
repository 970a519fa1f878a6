"""``model.stop`` and ``model.special_tokens``: what is taught to end an answer is what every export stops at."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from peft import AutoPeftModelForCausalLM
from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig

from gguf_of_folder import gguf_of_folder
from stoker.checkpoint.export.export_check import distance
from stoker.checkpoint.export.reference_answers import take_reference
from stoker.checkpoint.export.replay import answer
from stoker.checkpoint.export.write_export import Export, write_export
from stoker.checkpoint.load_run import open_run
from stoker.cli.main import main
from stoker.generate.request import Request
from stoker.job.load_job import load_job
from stoker.models.build_model import build_meta
from stoker.models.text import open_text_side
from stoker.models.tuning.quantise import device_for
from tiny_llama import save_tiny_llama

JOB = """
task: sft
model: {name: model, stop: <|im_end|>}
data: rows.jsonl
tune: {method: full}
steps: 4
train: {batch: 2, lr: 1e-3, seq_len: 64, precision: fp32}
output: run
faults: {restarts: 0}
checkpoint: {best: false, every: 4}
"""


def make_model(folder: Path, tokenizer: Tokenizer, *, rows: int | None = None) -> None:
    """A base model of ChatML's kind: its template ends turns with ``<|im_end|>``, its end token is another."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_key_value_heads": 4, "intermediate_size": 32}
    other = {} if rows is None else {"vocab_size": rows}
    save_tiny_llama(folder, tokenizer, end="<|endoftext|>", tie_word_embeddings=True, **sizes, **other)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> Path:
    """A base model, rows and a job."""
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "model", tokenizer)
    rows = [
        {"messages": [{"role": "user", "content": f"Where is {i}?"}, {"role": "assistant", "content": f"Here {i}."}]}
        for i in range(20)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def audited(capsys: pytest.CaptureFixture[str], *overrides: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["data", "job.yaml", "--json", *overrides])
    return code, json.loads(capsys.readouterr().out)


def said_by(folder: Path) -> dict[str, Any]:
    """The stop token, in every file of an export that names it."""
    found: dict[str, Any] = {"tokenizer_config.json": AutoTokenizer.from_pretrained(folder).eos_token_id}
    found["generation_config.json"] = GenerationConfig.from_pretrained(folder).eos_token_id
    if (folder / "config.json").is_file():
        found["config.json"] = json.loads((folder / "config.json").read_text())["eos_token_id"]
    return found


def test_without_a_name_the_gate_says_which_key_names_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "job.yaml").write_text(JOB.replace(", stop: <|im_end|>", ""))
    code, found = audited(capsys)
    assert code == 2 and "the stop token is never trained" in found["errors"][0]["message"]
    assert 'model.stop: "<|im_end|>"' in found["errors"][0]["suggestion"]


def test_every_export_stops_where_training_taught_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "job.yaml"]) == 0
    capsys.readouterr()
    run = open_run("run", folder)
    end = run.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert run.text.codec.stop_ids == {end} and run.tokenizer.eos_token_id == end
    reference = take_reference(run, folder)
    for form in ("merged", "gguf"):
        export = Export(form, folder / form, "fp32")  # type: ignore[arg-type]
        written = write_export(run, export, folder, lambda _: None)
    assert said_by(folder / "merged") == dict.fromkeys(
        ("tokenizer_config.json", "generation_config.json", "config.json"), end
    )
    gguf = pytest.importorskip("gguf")
    fields = gguf.GGUFReader(written).fields
    for name in ("eos", "eot"):
        assert int(fields[f"tokenizer.ggml.{name}_token_id"].parts[-1][0]) == end
    assert reference.stop_ids == (end,)


def test_an_adapter_with_new_tokens_replays_in_plain_peft(
    folder: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = "special_tokens: [<|call|>, <|back|>], stop: [<|im_end|>, <|call|>]"
    job = JOB.replace("stop: <|im_end|>", tokens).replace("{method: full}", "{method: lora, rank: 2}")
    (folder / "job.yaml").write_text(job)
    assert main(["train", "job.yaml"]) == 2  # the new rows would stay as they are
    assert "modules_to_save" in capsys.readouterr().err
    assert main(["train", "job.yaml", "tune.modules_to_save=[embed_tokens, lm_head]"]) == 0
    run = open_run("run", folder)
    known = tokenizer.get_vocab_size()
    assert run.model.get_input_embeddings().weight.shape[0] == 384 and len(run.tokenizer) == known + 2
    end, call = (run.tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|call|>"))
    assert run.text.codec.stop_ids == {end, call} and call == known
    reference = take_reference(run, folder)
    export = Export("adapter", folder / "adapter")
    written = write_export(run, export, folder, lambda _: None)
    model = AutoPeftModelForCausalLM.from_pretrained(written)  # which gives the base its new rows
    replayed = answer(model, reference.questions, reference.stop_ids)
    assert distance(reference.answers, replayed) < 1e-3
    assert said_by(written) == {"tokenizer_config.json": end, "generation_config.json": [end, call]}
    assert AutoTokenizer.from_pretrained(written)("<|call|>", add_special_tokens=False).input_ids == [call]


def test_a_token_that_is_not_there_is_an_error_at_its_place(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "job.yaml").write_text(JOB.replace("<|im_end|>", "<|imend|>"))
    assert main(["check", "job.yaml"]) == 2
    error = capsys.readouterr().err
    assert "job.yaml:3:" in error and "'<|imend|>' is not a token" in error and "did you mean <|im_end|>?" in error
    code, found = audited(capsys, "model.name=llama-3m")  # whose vocabulary is learnt from the rows
    assert code == 2 and found["errors"][0]["key"] == "model.stop" and found["errors"][0]["line"] == 3
    assert "did you mean <|endoftext|>?" in found["errors"][0]["suggestion"]


@pytest.mark.parametrize("model", ["llama-3m", "copy.gguf"])
def test_check_refuses_a_stop_that_training_would_refuse(
    model: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the tokenizer is still to be learnt, or in a GGUF file, as a packaged model's is."""
    if model.endswith(".gguf"):
        gguf_of_folder(folder / "model", folder / model)
    accepted, refused = f"model={{name: {model}, stop: <|endoftext|>}}", f"model={{name: {model}, stop: <|endoftex|>}}"
    assert main(["check", "job.yaml", accepted]) == 0
    assert main(["check", "job.yaml", refused]) == 2
    said = capsys.readouterr().err
    assert "'<|endoftex|>' is not a token of the vocabulary; did you mean <|endoftext|>?" in said
    assert main(["train", "job.yaml", refused]) == 2 and capsys.readouterr().err == said


def test_a_model_from_scratch_has_rows_for_them(folder: Path) -> None:
    tokens = "data[0].template={user: '<|ask|>{content}<|reply|>'}"
    model = "model={name: llama-3m, special_tokens: [<|ask|>, <|reply|>]}"
    loaded = load_job("job.yaml", [model, tokens])
    text = open_text_side(loaded, folder)
    built = build_meta(loaded.job, folder, device_for(loaded.job), stop_id=text.tokenizer.eos_token_id)
    assert built.new_rows is not None and built.new_rows.first == len(text.tokenizer) - 2
    rows = built.model.get_input_embeddings().weight.shape[0]
    assert rows >= len(text.tokenizer) and rows % 64 == 0


def test_roles_reach_the_tokenizer(folder: Path) -> None:
    block = "special_tokens: {pad: <|fill|>, eos: <|im_end|>, additional: [<|im_start|>]}"
    (folder / "job.yaml").write_text(JOB.replace("stop: <|im_end|>", block))
    text = open_text_side(load_job("job.yaml"), folder)
    assert (text.tokenizer.pad_token, text.tokenizer.eos_token) == ("<|fill|>", "<|im_end|>")
    assert text.codec.stop_ids == {text.tokenizer.eos_token_id}
    assert len(text.tokenizer) == 377  # only <|fill|> is new


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ("stop: <|im_end|>, special_tokens: {eos: <|endoftext|>}", "`model.stop` starts with '<|im_end|>'"),
        ("stop: [5]", "`model.stop[0]` must be"),
        ("stop: []", "`model.stop` is empty"),
        ("special_tokens: {end: x}", "unknown key `model.special_tokens.end`"),
        ("special_tokens: 5", "`model.special_tokens` must be a block"),
    ],
)
def test_wrong_values_are_refused(block: str, words: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "job.yaml").write_text(JOB.replace("stop: <|im_end|>", block))
    assert main(["check", "job.yaml"]) == 2
    error = capsys.readouterr().err
    assert "job.yaml:3:" in error and words in error


def test_chat_and_exports_ask_as_training_did(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "own.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}{{ mood }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant{{ mood | default('') }}\n{% endif %}"
    )
    source = (
        "data: {path: rows.jsonl, template: own.jinja, template_arguments: {mood: ' (kind)'}, train_on: everything}"
    )
    (folder / "job.yaml").write_text(JOB.replace("data: rows.jsonl", source).replace("steps: 4", "steps: 1"))
    assert main(["train", "job.yaml", "checkpoint.every=1"]) == 0
    asked: list[tuple[list[int], frozenset[int]]] = []

    def answer(engine: Any, tokenizer: Any, request: Request, *_: Any) -> Iterator[str]:
        asked.append((list(request.prompt), request.stop_ids))
        yield "Here."

    monkeypatch.setattr("stoker.generate.answer_text.stream_answer", answer)
    question = "Where is <|im_end|>?"
    assert main(["chat", "run", "--prompt", question]) == 0
    run = open_run("run", folder)
    write_export(run, Export("merged", folder / "merged"), folder, lambda _: None)
    tokenizer = AutoTokenizer.from_pretrained("merged")
    ((ids, stops),) = asked
    end = tokenizer.eos_token_id
    assert stops == {end} and ids.count(end) == 1  # the question's is text
    written = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    assert tokenizer.decode(ids) == written and written.endswith("<|im_start|>assistant (kind)\n")
    assert main(["eval", "run", "rows.jsonl", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["rows_used"] == 20 and found["tokens"] > 20 * 20  # of everything, as in training
