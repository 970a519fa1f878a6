"""The command `stoker submit`: dry runs, wrong input, and what a received run may not decide."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stoker.cli.main import main
from stoker.cli.options.submitted_options import meant_record
from stoker.cluster.record import Record, all_records, name_of, record_named, save_record
from stoker.errors import UserError
from stoker.runs.run_folder import RunFolder
from tiny_llama import save_tiny_llama
from tiny_tokenizer import tiny_tokenizer

SLURM = '{"slurm": {"nodes": 1, "gres": "none"}}'


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    save_tiny_llama(tmp_path / "tiny", tiny_tokenizer())
    (tmp_path / "rows.jsonl").write_text('{"instruction": "a", "output": "b"}\n' * 4)
    job = {"task": "sft", "model": "tiny", "data": "rows.jsonl", "steps": 2, "target": json.loads(SLURM)}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    return tmp_path


def test_a_dry_run_prints_the_script_and_sends_nothing(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(base.rglob("*"))
    assert main(["submit", "job.yaml", "--dry-run"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("#!/bin/bash\n#SBATCH --job-name=job\n") and said.err == ""
    assert sorted(base.rglob("*")) == before


def test_credentials_that_are_not_sent_are_named(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.cluster.unsent_credentials.unsent_credentials", lambda *_: ["X is not sent"])
    assert main(["submit", "job.yaml", "--dry-run"]) == 0
    assert capsys.readouterr().err == "X is not sent\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["job.yaml", "target.slurm.partion=x"], "unknown key `target.slurm.partion`; write `partition`"),
        (["job.yaml", "--on", "nowhere"], "there is no target nowhere"),
        (["job.yaml", "--include", "a"], "--include selects ssh hosts, and the target is slurm"),
        (["job.yaml", "--name", "My Run"], "not a valid name; use lower-case letters, digits and hyphens"),
        (["job.yaml", "target=local"], "the job has no target"),
        (["job.yaml", "target.slurm.send=[no_such.py]"], "there is no file no_such.py"),
        (["job.yaml", "output=s3://bucket/mine"], "is a URL, and a run has a local folder; write runs/mine here"),
        (["job.yaml", "target.slurm.nodes=4"], "4 nodes, and the layout (data 1) has 1 process; write at most 1"),
    ],
)
def test_wrong_input(base: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str) -> None:
    assert main(["submit", *words, "--dry-run"]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--include", ""], "command line: in `--include `: it names no host"),
        (["--include", "gpu9"], "command line: in `--include gpu9`: there is no host gpu9; did you mean gpu2?"),
        (["--exclude", "gpu1:0,0"], "command line: in `--exclude gpu1:0,0`: `gpu1:0,0` names a slot twice"),
        (["target.slurm.nodes=2"], "`target.slurm.nodes=2` is not a key of the target hosts.yaml, which is ssh"),
        (["target=lab"], "--on hosts.yaml and `target=lab` both name a target"),
        (["--json"], "--dry-run prints what would be sent, and --json the record"),
    ],
)
def test_options_of_a_named_target(base: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str) -> None:
    (base / "hosts.yaml").write_text("ssh: {hosts: [gpu1 slots=2, gpu2 slots=2]}\n")
    assert main(["submit", "job.yaml", "--on", "hosts.yaml", *words, "--dry-run"]) == 2
    assert told in capsys.readouterr().err
    assert main(["submit", "job.yaml", "--on", "hosts.yaml", "target.ssh.folder=elsewhere", "--dry-run"]) == 0
    assert "elsewhere/.store" in capsys.readouterr().out


def test_a_received_run_does_not_say_where_it_is_started(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (base / "events.jsonl").touch()
    assert main(["submit", "job.yaml", "--dry-run"]) == 2
    assert "a target runs commands, so it is not read from a run's own job.yaml" in capsys.readouterr().err
    (base / "mine.yaml").write_text(SLURM)
    assert main(["submit", "job.yaml", "--dry-run", "--on", "mine.yaml"]) == 0


def test_a_run_that_is_running_is_not_submitted_again(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    binaries, python = base / "bin", base / "bin/python"
    binaries.mkdir()
    as_there = 'case " $* " in *" -G "*) echo hostname 127.0.0.1;; *) eval "${@: -1}";; esac'
    for path, text in ((binaries / "ssh", as_there), (python, '[ "$1" = -c ] || exec sleep 60')):
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{binaries}:/usr/bin:/bin")
    target = {"ssh": {"hosts": ["here"], "folder": str(base / "there"), "python": str(python)}}
    (base / "config/stoker").mkdir(parents=True)
    (base / "config/stoker/targets.yaml").write_text(json.dumps({"lab": target}))
    submit = ["submit", "job.yaml", "--on", "lab", "output=runs/one"]
    assert main(submit) == 0
    assert main(submit) == 2
    told = "one is already running on lab; wait for it, `stoker stop one`, or give another --name"
    assert told in capsys.readouterr().err
    monkeypatch.setenv("XDG_STATE_HOME", str(base / "another-machine"))
    assert main(submit) == 2
    assert told.replace("stop one", "stop one --on lab") in capsys.readouterr().err
    assert main(["runs", "--on", "lab"]) == 0
    assert "running" in capsys.readouterr().out
    monkeypatch.setenv("XDG_STATE_HOME", str(base / "state"))
    assert main(["stop", "one"]) == 0
    assert "one: stopped" in capsys.readouterr().out


def test_records_are_found_by_name(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {"kind": "slurm", "target": {}, "on": "", "fingerprint": "f" * 64, "nodes": 1, "devices": 1}
    for number, name in enumerate(("first", "second")):
        save_record(
            Record(name=name, time=float(number), output=f"runs/{name}", base="/", handle={"job": "1"}, **values)
        )  # type: ignore[arg-type]
    kept = (base / "state/stoker/submitted/first.json").read_text()
    wrong = (
        "{}",
        "[" * 100_000,
        kept.replace('"time": 0.0', '"time": "now"'),
        kept.replace('"nodes": 1', '"nodes": [1]'),
    )
    for number, text in enumerate((*wrong, kept.replace('"name": "first"', '"name": 1'))):
        assert text != kept
        (base / f"state/stoker/submitted/broken-{number}.json").write_text(text)
    assert [record.name for record in all_records()] == ["second", "first"]
    with pytest.raises(UserError, match="no submitted job is named secnd; did you mean second"):
        record_named("secnd")
    for other, told in (
        ("steps=5", "first resumes with the job that was submitted, and `steps=5` would change it; `stoker submit JOB"),
        ("second", "first and second are two runs; resume one after another"),
    ):
        assert main(["resume", "first", other]) == 2
        assert told in capsys.readouterr().err
    for verb in ("stop", "resume", "describe"):
        assert main([verb, "thrid"]) == 2
        assert "no submitted job is named thrid" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "target"), [("later", {}), ("slurm", {"unheard_of": 1})])
def test_a_record_of_another_version_is_told(
    base: Path, capsys: pytest.CaptureFixture[str], kind: str, target: dict[str, int]
) -> None:
    values = {"time": 0.0, "on": "", "fingerprint": "f" * 64, "nodes": 1, "devices": 1, "output": "a", "base": "/"}
    save_record(Record(name="one", kind=kind, target=target, **values))  # type: ignore[arg-type]
    assert main(["stop", "one"]) == 2
    told = f"the record of the run one has a target `{kind}` that this version does not know"
    assert told in capsys.readouterr().err
    assert main(["runs", "--submitted"]) == 0
    assert told in capsys.readouterr().out


@pytest.mark.parametrize("name", ["a--b", "a" * 45, "mine"])
def test_a_name_is_found_as_it_was_given(base: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    values = {"kind": "slurm", "target": {}, "on": "", "fingerprint": "f" * 64, "nodes": 1, "devices": 1}
    for each in (name, name_of(name)):
        record = Record(name=each, time=0.0, output=f"runs/{each}", base="/", handle={"job": "1"}, **values)  # type: ignore[arg-type]
        save_record(record)
    assert record_named(name).name == record_named(f"runs/{name}/").name == name


def test_a_name_is_found_by_the_folder_that_it_is_made_from(base: Path) -> None:
    values = {"kind": "slurm", "target": {}, "on": "", "fingerprint": "f" * 64, "nodes": 1, "devices": 1}
    for name, output in (("a--b", "runs/a--b"), ("a-b", "/there/runs/A__b")):
        save_record(Record(name=name, time=0.0, output=output, base="/", handle={"job": "1"}, **values))  # type: ignore[arg-type]
    for run in ("A__b", "runs/A__b", "/here/runs/A__b/", "s3://b/runs/A__b"):
        assert record_named(run).name == "a-b"
    for run in ("other/A__b", "runs/b", "/A__b/"):
        with pytest.raises(UserError, match="no submitted job"):
            record_named(run)


def test_a_run_here_goes_before_an_ended_submission_of_its_name(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"kind": "slurm", "target": {"login": "nowhere"}, "on": "", "fingerprint": "f" * 64}
    save_record(
        Record(name="mine", time=0.0, output="runs/mine", base="/", nodes=1, devices=1, handle={}, **values)  # type: ignore[arg-type]
    )
    assert meant_record("mine") is not None
    folder = RunFolder(base / "runs/mine")
    (folder.path / "logs").mkdir(parents=True)
    folder.job.write_text("task: sft\n")
    folder.events.touch()
    (folder.path / "logs/rank-0.log").write_text("here\n")
    assert meant_record("mine") is not None
    assert main(["logs", "runs/mine"]) == 0
    assert capsys.readouterr().out == "rank 0 | here\n"
    assert main(["stop", "runs/mine"]) == 0
    with folder.take():
        assert main(["logs", "mine"]) == 0
        assert meant_record("mine") is None
    save_record(
        Record(name="mine", time=0.0, output="runs/mine", base=str(base), nodes=1, devices=1, handle={},
               **{**values, "target": {}})  # type: ignore[arg-type]
    )  # fmt: skip
    assert meant_record("runs/mine") is not None  # it trains in this folder


@pytest.mark.parametrize(("kind", "target"), [("ssh", {"hosts": ["a"]}), ("slurm", {"login": "nowhere"})])
def test_the_folder_of_a_submitted_run_on_storage_that_is_mounted_here(
    base: Path, kind: str, target: dict[str, Any]
) -> None:
    folder = base / "shared/mine"
    folder.mkdir(parents=True)
    (folder / "events.jsonl").touch()
    values = {"kind": kind, "target": target, "on": "", "fingerprint": "f" * 64, "nodes": 1, "devices": 1}
    for output, found in ((str(folder), True), (f"{folder}-2", False)):
        save_record(Record(name="mine", time=0.0, output=output, base="/elsewhere", handle={}, **values))  # type: ignore[arg-type]
        assert (meant_record(str(folder)) is not None) == found


def test_logs_of_a_run_of_this_machine(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = base / "runs/here"
    (folder / "logs").mkdir(parents=True)
    (folder / "job.yaml").write_text("task: sft\n")
    (folder / "events.jsonl").touch()
    for rank in range(2):
        (folder / f"logs/rank-{rank}.log").write_text(f"from {rank}\n")
    assert main(["logs", "here"]) == 0
    assert capsys.readouterr().out == "rank 0 | from 0\nrank 1 | from 1\n"
    assert main(["logs", "runs/here", "--rank", "1", "-f"]) == 0
    assert capsys.readouterr().out == "from 1\n"
    assert main(["logs", "here", "--rank", "7"]) == 2
    values = {"kind": "slurm", "target": {}, "on": "", "fingerprint": "f" * 64, "nodes": 1, "devices": 1}
    save_record(Record(name="mine", time=0.0, output="runs/mine", base="/", handle={"job": "1"}, **values))  # type: ignore[arg-type]
    capsys.readouterr()
    assert main(["logs", "mina"]) == 2
    assert "there is no run mina here, and no submitted run of that name; did you mean mine?" in capsys.readouterr().err
