"""``stoker check`` and the command line around it: outputs, exit codes, speed."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from stoker.cli.main import MODULES, VERBS, main
from stoker.job import load_job
from tiny_llama import save_tiny_llama

GOOD = "task: sft\nmodel: smollm2-135m\ndata: my.jsonl\ntune: lora\nsteps: 60\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("my.jsonl").write_text('{"instruction": "a", "output": "b"}\n')
    Path("job.yaml").write_text(GOOD)
    return tmp_path


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["check", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_job_is_printed_with_the_origin_of_each_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "job.yaml", "train.batch=4"]) == 0
    lines = {line.split(":")[0].strip(" -"): line for line in capsys.readouterr().out.splitlines()}
    assert lines["task"].split("#") == [f"{'task: sft':<44}", " job.yaml:1:7"]
    assert lines["batch"].endswith("# command line: train.batch=4")
    assert lines["alpha"].endswith("# twice the rank (16)")
    assert lines["precision"].startswith("  precision: auto ")


def test_the_layout_is_told_in_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "job.yaml", "parallel={data: 2, shard: zero3, tensor: 2}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if line.startswith("parallel:"))
    assert line.endswith("  # 4 processes: data 2 (zero3) x tensor 2 + sequence")
    assert not any(line.startswith("  schedule: 1f1b") for line in lines)  # no pipeline, no schedule


def test_what_is_printed_is_a_job_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "job.yaml", "output=runs/x"]) == 0
    Path("again.yaml").write_text(capsys.readouterr().out)
    assert load_job("again.yaml").job == load_job("job.yaml", ["output=runs/x"]).job


def test_json_of_a_good_job(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = as_json(capsys, "job.yaml", "train.lr=1e-3")
    assert code == 0
    assert set(answer) == {"ok", "job", "origins", "errors"}
    assert (answer["ok"], answer["errors"]) == (True, [])
    assert answer["job"]["train"]["lr"] == 1e-3
    assert answer["job"]["tune"]["alpha"] == 32
    assert answer["origins"]["train.lr"] == {"source": "override", "where": "train.lr=1e-3", "why": ""}
    assert answer["origins"]["model.name"] == {"source": "file", "where": "job.yaml:2:8", "why": ""}
    assert answer["origins"]["train.batch"] == {
        "source": "default",
        "where": "",
        "why": "the default of task sft",
    }


def test_changes_of_a_run_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    run = Path("runs/job")
    run.mkdir(parents=True)
    assert main(["check", "job.yaml", "train.seq_len=512", "train.precision=fp32"]) == 0  # as the run has set them
    (run / "job.yaml").write_text(capsys.readouterr().out)
    (run / "events.jsonl").write_text('{"event": "saved", "where": "disk", "step": 60}\n')
    changed = ["job.yaml", "steps=80", "train.lr=1e-3", "evaluate.every=7"]
    found = as_json(capsys, *changed)[1]["resume"]
    (rate,) = found["refused"]
    assert (found["folder"], rate["key"], rate["after"]) == ("runs/job", "train.lr", "0.001")
    accepted = {each["key"]: each["after"] for each in found["accepted"]}
    assert (accepted["steps"], accepted["evaluate.every"]) == ("80", "7")
    assert accepted.keys() == {"steps", "evaluate.every", "checkpoint.every"}  # the last follows the steps
    assert main(["check", *changed]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("# runs/job holds a run that does not resume with this job (train.lr was ")
    (run / "events.jsonl").write_text("")  # it has no state, so that it begins again
    found = as_json(capsys, *changed)[1]["resume"]
    assert found["refused"] == [] and len(found["accepted"]) == 4


def test_json_of_a_bad_job(capsys: pytest.CaptureFixture[str]) -> None:
    Path("job.yaml").write_text(GOOD + "train:\n  lrr: 1\n")
    code, answer = as_json(capsys, "job.yaml")
    assert code == 2
    assert answer == {
        "ok": False,
        "job": None,
        "origins": {},
        "errors": [
            {
                "file": "job.yaml",
                "line": 7,
                "column": 3,
                "key": "train.lrr",
                "message": "unknown key `train.lrr`",
                "suggestion": "write `lr`",
                "repeats": False,
                "columns": None,
                "missing_file": "",
            }
        ],
    }


def test_errors_go_to_stderr_one_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("job.yaml").write_text(GOOD + "train:\n  lrr: 1\n  clip: x\n")
    assert main(["check", "job.yaml"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "error: job.yaml:7:3: unknown key `train.lrr`; write `lr`",
        "error: job.yaml:8:9: `train.clip` must be a number of at least 0, not 'x'; write a value such as 1.0",
    ]


def test_a_problem_of_several_keys_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    grpo = "grpo: {rewards: numeric, prompts: 2, answers: 2}\ntrain: {batch: 3}\n"
    Path("job.yaml").write_text(GOOD.replace("sft", "grpo") + grpo)
    assert main(["check", "job.yaml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "which does not divide the 4 answers of an iteration (see also " in line
    _, answer = as_json(capsys, "job.yaml")
    assert [problem["repeats"] for problem in answer["errors"]] == [True, True, False]


def test_rewards_that_training_would_refuse_are_found_at_their_key(capsys: pytest.CaptureFixture[str]) -> None:
    grpo = "grpo: {prompts: 4, answers: 2, rewards: ['code:0', 'rouge:rouge9', 'python:no_such:f', numeric]}\n"
    Path("job.yaml").write_text(GOOD.replace("sft", "grpo") + grpo)
    assert main(["check", "job.yaml"]) == 2
    place = "error: job.yaml:6:32: "
    assert capsys.readouterr().err.splitlines() == [
        f"{place}the time limit '0' is not a number; write a whole number of seconds up to 600: code:5",
        f"{place}there is no measure 'rouge9' of rouge; take one of rouge1, rouge2, rougeL",
        f"{place}python:no_such:f: there is no module 'no_such'; is it in this folder?",
    ]


def test_a_missing_source_and_model_are_found_at_their_keys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, answer = as_json(capsys, "job.yaml", "data=missing.jsonl", "model=nowhere")
    assert code == 2
    assert {(e["file"], e["key"]) for e in answer["errors"]} == {
        ("command line", "data[0].path"),
        ("command line", "model.name"),
    }
    Path("my.jsonl").unlink()
    code, answer = as_json(capsys, "job.yaml")
    assert [(e["line"], e["column"], e["key"]) for e in answer["errors"]] == [(3, 7, "data[0].path")]


def test_a_job_may_come_from_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    for words, code, said in (
        ([], 0, "\ntask: sft "),
        (["train.lrr=1"], 2, "unknown key `train.lrr`"),
        (["--fix"], 2, "only a file can be updated, and this is a pipe; name the job file"),
    ):
        read, write = os.pipe()
        os.write(write, GOOD.replace("version: 1\n", "").encode())
        os.close(write)
        assert main(["check", f"/dev/fd/{read}", *words]) == code
        os.close(read)
        printed = capsys.readouterr()
        assert said in printed.out + printed.err


def test_fix_changes_the_file_once_and_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    Path("job.yaml").write_text("# mine\n" + GOOD + "learning_rate: 1e-4  # rate\n")
    Path("job.yaml").chmod(0o640)
    assert main(["check", "job.yaml", "--fix"]) == 0
    fixed = "# mine\nversion: 1\n" + GOOD + "train:\n  lr: 1e-4  # rate\n"
    assert Path("job.yaml").read_text() == fixed
    assert Path("job.yaml").stat().st_mode & 0o777 == 0o640
    assert "-learning_rate: 1e-4  # rate\n+train:\n+  lr: 1e-4  # rate\n" in capsys.readouterr().out
    assert main(["check", "job.yaml", "--fix"]) == 0
    assert "nothing to fix" in capsys.readouterr().out
    assert Path("job.yaml").read_text() == fixed
    assert sorted(path.name for path in Path().iterdir()) == ["job.yaml", "my.jsonl"]


def test_fix_still_refuses_what_it_cannot_mend(capsys: pytest.CaptureFixture[str]) -> None:
    Path("job.yaml").write_text(GOOD + "modul: 1\nzzz: 1\n")
    assert main(["check", "job.yaml", "--fix", "--json"]) == 2
    said = capsys.readouterr()
    assert "unknown key `zzz`" in {error["message"] for error in json.loads(said.out)["errors"]}


def test_the_schema_is_printed_without_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "Stoker job"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["check"], 2, "no job file is given"),
        (["check", "none.yaml"], 2, "error: none.yaml: there is no such file"),
        (["trian"], 2, "there is no verb `trian`; write `stoker train`"),
        (["job.yaml"], 2, "write `stoker check job.yaml`"),
        (["qqqqq"], 2, "take one of new, check"),
        (["compare"], 2, "take one of new, check"),  # `cache` is not near
    ],
)
def test_wrong_command_lines(words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["data", "verify", "chaos", "submit"])
def test_overrides_are_not_among_what_is_required(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([verb])
    assert capsys.readouterr().err.endswith("error: the following arguments are required: JOB\n")


@pytest.mark.parametrize("words", [["runs"], ["chat"], ["stop"], ["rollouts"], ["import"], ["ui", "--runs"]])
def test_a_name_that_no_file_can_have_is_one_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "x" * 300]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.endswith("no file or folder can have so long a name\n")
    assert said.count("\n") == 1


def test_help_names_every_verb_and_version_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"\n  {verb} " in told for verb in VERBS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("stoker 0.")


def test_an_option_of_several_values_keeps_those_of_both_its_uses() -> None:
    seen = set()
    for verb in VERBS:
        parser = argparse.ArgumentParser()
        importlib.import_module(f"stoker.cli.commands.{MODULES.get(verb, verb)}").add_arguments(parser)
        for action in parser._actions:
            if action.option_strings and action.nargs == "+":
                read = argparse.Namespace(**{action.dest: action.default})
                for value in ("one", "two"):
                    action(parser, read, [value], action.option_strings[0])
                seen.add(action.dest)
                assert getattr(read, action.dest)[-2:] == ["one", "two"], (verb, action.dest)
    assert {"score", "tasks"} <= seen


def test_ctrl_c_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("stoker.cli.commands.check.open_job", interrupted)
    assert main(["check", "job.yaml"]) == 130


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    program = subprocess.Popen(
        [sys.executable, "-m", "stoker", "check", "job.yaml"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert program.stdout is not None and program.stderr is not None
    program.stdout.close()
    assert program.wait(timeout=60) == 141
    assert program.stderr.read() == b""


@pytest.mark.parametrize(
    ("words", "heavy"),
    [
        (["--help"], ["torch", "transformers", "numpy", "pydantic"]),
        (["check", "job.yaml"], ["torch", "transformers", "numpy"]),
    ],
)
def test_the_command_loads_little(words: list[str], heavy: list[str]) -> None:
    code = "import contextlib, sys; from stoker.cli.main import main\n"
    code += f"with contextlib.suppress(SystemExit): main({words!r})\n"
    code += f"print(sorted(set({heavy!r}) & set(sys.modules)), file=sys.stderr)"
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ended.stdout and ended.stderr.splitlines()[-1] == "[]"


def test_a_run_whose_folder_is_named_like_a_url_is_checked_as_before() -> None:
    run = Path("s3:/bucket/mine")
    run.mkdir(parents=True)
    Path("job.yaml").write_text("task: sft\nmodel: llama-3m\ndata: my.jsonl\nsteps: 2\n")
    for name in ("job.yaml", "events.jsonl"):
        (run / name).touch()
    assert main(["check", "job.yaml", "output=s3://bucket/mine"]) == 0


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "checkpoint.to=foo://x/y",
            "checkpoint.to: foo://x/y cannot hold checkpoints: there is no kind of store foo://",
        ),
        ("checkpoint.to=http://host/x", "files of a web server are read only (http://host/x); give a folder, or a URL"),
        ("checkpoint.to=my.jsonl/x", "my.jsonl, which is no folder"),
        ("output=my.jsonl/x/y", "my.jsonl, which is no folder"),
        (f"output={'x' * 300}", "File name too long"),
        ("output=s3://bucket/mine", "is a URL, and a run has a local folder; write runs/mine here"),
        ("model=~nobody/x", "there is no file or folder ~nobody/x"),
        (f"model={'x' * 300}", "there is no model"),
        ("data=~nobody/x.jsonl", "no such file or folder: ~nobody/x.jsonl"),
        ("epochs=1e300", "must be a number above 0 and at most 1e+06, not 1e+300"),
        ("mix.temperature=1e-300", "must be a number of at least 0.01, not 1e-300"),
        ("train.batch=99999999999", "is 99999999999, larger than any count can be; write at most 2147483647"),
        ("train.batch=99999999999999999999", "cannot be read as a whole number of 64 bits"),
        ("train.seq_len=99999999999", "larger than any count can be"),
        ("faults.hang=1e300", "at most 1e+07"),
        ("\udcff=1", "it contains U+DCFF, which is not allowed in text"),
        (
            "train={micro_batch: 2000000000, accumulation: 2000000000}",
            "a step would take 4000000000000000000 sequences",
        ),
    ],
)
def test_what_train_would_refuse_is_refused(override: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    job = "task: sft\nmodel: llama-3m\ndata: my.jsonl\n"
    Path("job.yaml").write_text(job if "epochs" in override else f"{job}steps: 2\n")
    assert main(["check", "job.yaml", override]) == 2
    assert said in capsys.readouterr().err


def test_sequences_beyond_the_models_context_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["model=llama-3m", "tune.method=prompt"]
    assert main(["check", "job.yaml", *model, "train.seq_len=2000"]) == 2
    assert "train.seq_len: 2000 is above the" in capsys.readouterr().err
    assert main(["check", "job.yaml", *model, "tune.tokens=1000000000"]) == 2
    assert "virtual tokens leave no room in the" in (said := capsys.readouterr().err) and "write -" not in said
    assert main(["check", "job.yaml", *model, "train.seq_len=auto"]) == 0


def test_a_printed_job_leaves_the_default_sequence_length_to_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=llama-3m", "tune.method=prompt", "tune.tokens=20"]
    assert main(["check", "job.yaml", *words]) == 0
    Path("printed.yaml").write_text(printed := capsys.readouterr().out)
    assert re.search(r"seq_len: auto +# \d+: ", printed)
    assert main(["check", "printed.yaml"]) == 0
    assert main(["check", "job.yaml", *words, "train.seq_len=256"]) == 0
    assert "seq_len: 256" in capsys.readouterr().out


@pytest.mark.parametrize("tune", ["full", "lora"])
def test_a_base_that_is_stored_quantised_is_refused(
    tune: str, folder: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_llama(folder / "small", tokenizer)
    capsys.readouterr()  # what importing libraries prints
    config = json.loads((folder / "small" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "small" / "config.json").write_text(json.dumps(config))
    Path("job.yaml").write_text(GOOD.replace("smollm2-135m", "small").replace("tune: lora", f"tune: {tune}"))
    code, answer = as_json(capsys, "job.yaml")
    found = [error for error in answer["errors"] if "stored quantised" in error["message"]]
    assert code == 2 and [(error["line"], error["column"]) for error in found] == [(2, 8)]
    assert "model.quantise: 4bit" in found[0]["suggestion"]


@pytest.mark.parametrize(
    ("written", "place", "name"),
    [
        ("model: org/small", "job.yaml:2:8", "org/small"),
        ("model: {name: smollm2-135m, tokenizer: org/tok}", "job.yaml:2:40", "org/tok"),
        ("model: smollm2-135m\ntune: {method: full}\nevaluate: {data: org/rows}", "job.yaml:4:18", "org/rows"),
    ],
)
def test_an_id_that_the_hub_cannot_be_asked_for_is_an_error_at_its_place(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, written: str, place: str, name: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("stoker.node_cache.hub.PAUSE", 0)
    Path("job.yaml").write_text(f"task: sft\n{written}\ndata: my.jsonl\nsteps: 60\n")
    for command in ("data", "verify"):
        assert main([command, "job.yaml"]) == 1
        assert f"error: {place}: {name} is neither here nor in the hub's cache" in capsys.readouterr().err
    assert main(["check", "job.yaml"]) == 0  # the job may be for another machine
    assert f"note: {place}: {name} is neither here nor in the hub's cache" in capsys.readouterr().err
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["train", "job.yaml"]) == 2
    assert f"{place}: {name} is neither here nor" in capsys.readouterr().err
