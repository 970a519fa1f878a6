"""train, runs, eval, chat and export as a user calls them, on a tiny model: what comes out is what was trained."""

from __future__ import annotations

import io
import json
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
)

from stoker.checkpoint.export import write_export as exporting
from stoker.checkpoint.export.claim_target import claimed_target
from stoker.checkpoint.export.write_export import Export, check_export
from stoker.checkpoint.load_run import open_run
from stoker.cli.main import main
from stoker.data.templates.chat_template import CHATML
from stoker.generate.open_model import OpenModel
from tiny_llama import save_tiny_llama

ROWS = [
    ("How are you?", "I am well, thank you."),
    ("What is blue?", "The sea is blue."),
    ("Who is cold?", "The wind."),
]


@pytest.fixture(scope="module")
def base(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a LoRA run and a full run have been trained by the command."""
    base = tmp_path_factory.mktemp("what-came-out")
    save_tiny_llama(base / "tiny", tokenizer)
    lines = (json.dumps({"prompt": f"{q} {i}", "completion": a}) for i in range(12) for q, a in ROWS)
    (base / "rows.jsonl").write_text("\n".join(lines) + "\n")
    common = "task: sft\nmodel: tiny\ndata: rows.jsonl\nsteps: 8\n"
    common += "train: {lr: 1e-2, batch: 4, seq_len: 64, precision: fp32}\n"
    (base / "lora.yaml").write_text(common + "tune: lora\nevaluate: {fraction: 0.2, every: 4}\n")
    (base / "full.yaml").write_text(common + "tune: full\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(base)
        assert main(["train", "lora.yaml", "--json"]) == 0
        assert main(["train", "full.yaml"]) == 0
    return base


@pytest.fixture(autouse=True)
def here(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(base)


def test_a_run_folder_holds_what_the_readme_says(base: Path) -> None:
    run = base / "runs" / "lora"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == list(range(1, 9))
    keys = "step loss grad_norm lr tokens trained_tokens tokens_per_s memory_gib seconds"
    more = "time samples first_sample data_seconds stall effective"
    assert all(set(m) == {*keys.split(), *more.split()} for m in metrics)
    events = [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert next(event for event in events if event != "checked") == "started" and events[-1] == "done"
    assert {"evaluated", "saved"} <= set(events)
    environment = json.loads((run / "environment.json").read_text())
    assert {"versions", "device", "git", "data"} <= set(environment)
    assert main(["check", str(run / "job.yaml")]) == 0


def test_runs_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--json"]) == 0
    runs = {Path(run["path"]).name: run for run in json.loads(capsys.readouterr().out)}
    assert set(runs) == {"lora", "full"}
    assert all(run["state"] == "done" and run["step"] == run["steps"] == 8 for run in runs.values())


@pytest.mark.parametrize("name", ["lora", "runs/lora"])
def test_runs_takes_a_name_or_a_folder(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", name, "--json"]) == 0
    assert [Path(run["path"]).name for run in json.loads(capsys.readouterr().out)] == ["lora"]


def test_the_same_command_says_that_it_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "full.yaml", "faults.restarts=0"]) == 0
    assert "this run is done: 8 steps" in capsys.readouterr().out


@pytest.mark.parametrize("tune", ["lora", "prompt"])
def test_the_export_that_training_names_can_be_written(
    tune: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"tune.method={tune}", f"output={tmp_path}/run", "steps=1", "faults.restarts=0"]
    assert main(["train", "full.yaml", *words]) == 0
    named = re.search(r"^  stoker (export .*) --to exported$", capsys.readouterr().out, re.MULTILINE)
    assert named
    _, run, _, form = named[1].split()
    check_export(open_run(run, Path.cwd()), Export(form, tmp_path / "exported"))


def test_an_adapter_has_no_place_for_changes_of_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"output={tmp_path}/run", "steps=1", "faults.restarts=0", "model.config.max_position_embeddings=96"]
    assert main(["train", "full.yaml", "tune.method=lora", *words]) == 0
    assert main(["export", f"{tmp_path}/run", "--format", "adapter", "--to", f"{tmp_path}/adapter"]) == 2
    assert "which has no changes of model.config; write --format merged" in capsys.readouterr().err
    assert main(["export", f"{tmp_path}/run", "--format", "merged", "--to", f"{tmp_path}/merged"]) == 0
    assert json.loads((tmp_path / "merged/config.json").read_text())["max_position_embeddings"] == 96


def test_eval_measures_what_training_measured(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "runs/lora", "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    events = [json.loads(line) for line in (base / "runs/lora/events.jsonl").read_text().splitlines()]
    last = [event for event in events if event["event"] == "evaluated"][-1]
    assert got["loss"] == pytest.approx(last["loss"], abs=1e-6)
    assert got["perplexity"] == pytest.approx(torch.tensor(got["loss"]).exp().item(), rel=1e-4)
    assert got["step"] == 8 and 0 <= got["token_accuracy"] <= 1


def test_eval_on_data_equals_transformers_own_loss(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (base / "one.jsonl").write_text(json.dumps({"prompt": "What is blue? 1", "completion": "The sea."}) + "\n{broken\n")
    assert main(["eval", "full", "one.jsonl", "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    tuned = open_run("full", base)
    messages = [{"role": "user", "content": "What is blue? 1"}, {"role": "assistant", "content": "The sea."}]
    ids = tuned.tokenizer.apply_chat_template(messages, return_dict=False)
    asked = tuned.tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    labels = torch.tensor([[-100] * len(asked) + ids[len(asked) :]])
    labels[0, labels[0].eq(tuned.tokenizer.eos_token_id).nonzero()[-1] + 1 :] = -100  # behind the stop token
    expected = tuned.model(input_ids=torch.tensor([ids]), labels=labels).loss.item()
    assert got["loss"] == pytest.approx(expected, abs=1e-5)
    assert got["rows_used"] == 1 and got["rows_dropped"] == 1


def test_eval_compares_with_the_untuned_model(capsys: pytest.CaptureFixture[str]) -> None:
    for run in ("lora", "full"):
        assert main(["eval", run, "rows.jsonl", "--compare", "--json"]) == 0
        got = json.loads(capsys.readouterr().out)
        assert got["tuned"]["loss"] < got["untuned"]["loss"] - 0.5


def test_chat_answers_and_compares(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "lora", "--prompt", "What is blue? 3", "--compare", "--max-tokens", "12"]) == 0
    before, after = capsys.readouterr().out.strip().split("\n[after 8 steps] ")
    tuned = open_run("lora", base)
    ids = tuned.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is blue? 3"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=False,
    )
    generated = tuned.model.generate(input_ids=ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert after == tuned.tokenizer.decode(generated, skip_special_tokens=True).rstrip("\n")
    assert before.removeprefix("[before] ") != after


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the second one without a locale
def test_chat_refuses_input_that_is_not_utf8(
    base: Path, errors: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8", errors))
    assert main(["chat", "lora"]) == 2
    assert capsys.readouterr().err == "error: standard input is not text in UTF-8\n"


def test_chat_goes_on_after_a_line_that_is_too_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{'sea ' * 400}\nWhat is blue? 3\n"))
    assert main(["chat", "lora", "--max-tokens", "4"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and "built for 128" in said.err and said.out.strip()


def test_an_interrupt_stops_an_answer_and_not_the_conversation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    real_ids, real_print = OpenModel.prompt_ids, print
    lines = iter(["What is blue? 3", "And you?"])

    def prompt_ids(opened: OpenModel, turns: Any) -> list[int]:
        asked.append(turns)
        return real_ids(opened, turns)

    def first_piece_interrupts(*values: Any, **options: Any) -> None:
        real_print(*values, **options)
        if options.get("end") == "" and len(asked) == 1:
            signal.raise_signal(signal.SIGINT)

    def line(_: str) -> str:
        found = next(lines, None)
        if found is None:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", line)
    monkeypatch.setattr("builtins.print", first_piece_interrupts)
    monkeypatch.setattr(OpenModel, "prompt_ids", prompt_ids)
    assert main(["chat", "lora", "--max-tokens", "8"]) == 130
    _, stopped, whole = capsys.readouterr().out.splitlines()
    assert asked[1][1] == {"role": "assistant", "content": stopped} and 0 < len(stopped) < len(whole)


def test_an_adapter_loads_in_plain_peft_to_the_same_logits(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "lora", "--format", "adapter", "--to", "out/adapter"]) == 0
    assert "in a fresh process" in capsys.readouterr().out
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base / "tiny"), base / "out/adapter").eval()
    tuned = open_run("lora", base)
    ids = torch.arange(20)[None]
    assert torch.equal(plain(input_ids=ids).logits, tuned.model(input_ids=ids).logits)
    assert AutoTokenizer.from_pretrained(base / "out/adapter").chat_template == CHATML
    (base / "plain").touch()  # whoever may read this may read the export
    assert {file.stat().st_mode for file in (base / "out/adapter").iterdir()} == {(base / "plain").stat().st_mode}


@pytest.mark.usefixtures("in_process_replay")
@pytest.mark.parametrize("run", ["lora", "full"])
def test_merged_weights_load_in_plain_transformers(base: Path, run: str) -> None:
    assert main(["export", run, "--format", "merged", "--to", f"out/merged-{run}"]) == 0
    plain = AutoModelForCausalLM.from_pretrained(base / f"out/merged-{run}").eval()
    tuned = open_run(run, base)
    ids = torch.arange(20)[None]
    torch.testing.assert_close(plain(input_ids=ids).logits, tuned.model(input_ids=ids).logits, atol=2e-5, rtol=1e-4)
    assert plain.generation_config.eos_token_id == tuned.tokenizer.eos_token_id


@pytest.mark.usefixtures("in_process_replay")
def test_an_export_prints_its_stages_beside_its_result(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "lora", "--format", "merged", "--quantise", "int8", "--to", "out/stages", "--json"]) == 0
    said = capsys.readouterr()
    assert [line.split()[0] for line in said.err.splitlines() if line.endswith(" ...")] == [
        *("opening", "computing", "merging", "quantising", "writing", "comparing")
    ]
    assert json.loads(said.out)["step"] == 8


def test_a_second_export_into_a_folder_is_refused(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with claimed_target(base / "out" / "twice"):
        assert main(["export", "lora", "--format", "merged", "--to", "out/twice"]) == 2
    assert "another export is writing to" in capsys.readouterr().err and not (base / "out" / "twice").exists()


def test_a_gguf_is_replayed(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "lora", "--format", "gguf", "--to", "out/gguf", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert Path(said["written"]).is_file() and "llama.cpp" in said["verified"]


@pytest.mark.usefixtures("in_process_replay")
@pytest.mark.parametrize("form", ["merged", "gguf"])
def test_an_export_that_answers_otherwise_is_not_called_done(
    base: Path, form: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = exporting.merged_model

    def broken(model: torch.nn.Module) -> torch.nn.Module:
        merged = honest(model)
        with torch.no_grad():
            merged.model.layers[1].self_attn.v_proj.weight.mul_(1.5)
        return merged

    monkeypatch.setattr(exporting, "merged_model", broken)
    assert main(["export", "lora", "--format", form, "--to", f"out/broken-{form}"]) == 1
    assert "differently" in capsys.readouterr().err
    assert not (base / f"out/broken-{form}").exists()
    assert (base / f"out/broken-{form}.differs").exists()


@pytest.mark.usefixtures("in_process_replay")
def test_a_stop_token_that_got_lost_is_found(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The head's row of the stop token swapped for another: the logits of one token only."""
    from stoker.checkpoint.export.export_check import verify
    from stoker.checkpoint.export.reference_answers import take_reference
    from stoker.errors import RunFailed

    assert main(["export", "full", "--format", "merged", "--to", "out/stop"]) == 0
    tuned = open_run("full", base)
    reference = take_reference(tuned, base)
    weights = load_file(base / "out/stop/model.safetensors")
    stop = tuned.tokenizer.eos_token_id
    weights["lm_head.weight"][stop] = weights["lm_head.weight"][stop + 5]
    save_file(weights, base / "out/stop/model.safetensors", {"format": "pt"})
    with pytest.raises(RunFailed, match="differ"):
        verify(reference, tuned.model, Export("merged", base / "out/stop"), base / "out/stop")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["export", "full", "--format", "adapter", "--to", "x"], "there is no adapter"),
        (["export", "lora", "--format", "merged", "--to", "tiny"], "exists already"),
        (["export", "lora", "--format", "merged", "--to", "link"], "link is a link: give the folder that it points to"),
        (["export", "lora", "--format", "gguf", "--to", "x", "--dtype", "q9"], "q8_0"),
        (
            ["export", "lora", "--format", "gguf", "--to", "x", "--dtype", "Q4_K_M"],
            "export as q4_1, or as fp16 and then run: llama-quantize FILE OUT Q4_K_M",
        ),
        (["export", "lora", "--format", "merged", "--to", "x", "--at", "3"], "no checkpoint '3'"),
        (["chat", "lor"], "did you mean runs/lora"),
        (["chat", "runs/lor"], "there is no run runs/lor; did you mean runs/lora?"),
        (["eval", "runs/lor"], "there is no run runs/lor; did you mean runs/lora?"),
        (["runs", "lor"], "did you mean runs/lora"),
        (["chat", "lora", "--max-tokens", "0"], "--max-tokens"),
        (["chat", "lora", "--prompt", ""], "--prompt is empty"),
        (["chat", "lora", "--prompt", "caf\udce9"], "--prompt is not text in UTF-8"),
        (["chat", "lora", "--prompt", "sea " * 400], "built for 128 with the answer"),
        (["eval", "lora", "row.jsonl"], "row.jsonl"),
        (["eval", "full", "rows.jsonl", "--format", "rows"], "there is no such format"),
        (["eval", "lora.yaml"], "is a file"),
    ],
)
def test_wrong_input_is_one_clear_error(
    base: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if not (base / "link").is_symlink():
        (base / "link").symlink_to("nowhere")
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].startswith("error: ") and says in captured.err
    assert "Traceback" not in captured.err and not (base / "x").exists()


@pytest.mark.parametrize("words", [("--format", "adapter", "--to", "x"), ("--format", "merged", "--to", "tiny")])
def test_an_impossible_export_loads_no_model(
    base: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("stoker.checkpoint.load_run.build_model", lambda *_, **__: pytest.fail("it was loaded"))
    assert main(["export", "full", *words]) == 2
    assert capsys.readouterr().err.startswith("error: ")
