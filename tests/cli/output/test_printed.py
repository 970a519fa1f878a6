"""What reaches the terminal: nothing that steers it, and clear errors where the machine lacks something."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from stoker.cli import main as command
from stoker.cli.main import main
from stoker.console import Console
from stoker.terminal import Output, escape_control_characters

ESCAPES = {
    "colour": "\x1b[31mred",
    "title": "\x1b]0;title\x07",
    "C1": "\x9b31m",
    "return": "good\rbad",
    "bidi": "\u202egnp.exe",
    "isolate": "\u2067x",
    "surrogate": "\ud83d",
    "delete": "\x7f",
}
STEERING = set("".join(ESCAPES.values())) - set("redtilgobagnp.exe[]0;31mx")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("my.jsonl").write_text('{"instruction": "a", "output": "b"}\n')
    Path("job.yaml").write_text("task: sft\nmodel: llama-3m\ndata: my.jsonl\nsteps: 2\n")
    return tmp_path


def stoker(words: str, shell: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f"{shell}{sys.executable} -m stoker {words}"], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("kind", ESCAPES)
def test_text_that_steers_a_terminal_is_shown_as_escapes(kind: str) -> None:
    text = f"a\tb\n{ESCAPES[kind]} ünïcode 日本語 العربية"
    shown = escape_control_characters(text)
    assert not STEERING & set(shown) and "ünïcode 日本語 العربية" in shown and shown.startswith("a\tb\n")
    assert json.loads(escape_control_characters(json.dumps(ESCAPES[kind], ensure_ascii=False))) == ESCAPES[kind]
    assert escape_control_characters(shown) == shown


@pytest.mark.parametrize("kind", sorted(set(ESCAPES) - {"surrogate"}))
def test_keys_values_and_overrides_of_the_user_are(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = json.dumps(ESCAPES[kind])
    Path("bad.yaml").write_text(f"task: sft\nmodel: {text}\n{text}: 1\ndata: {text}\noutput: {text}\n")
    assert main(["check", "bad.yaml"]) == 2
    assert main(["check", "job.yaml", f"output={text}"]) == 0
    assert main(["check", "job.yaml", f"{ESCAPES[kind]}=1"]) == 2
    assert main([ESCAPES[kind]]) == 2
    with pytest.raises(SystemExit):
        main(["check", f"--{ESCAPES[kind]}"])
    written = capsys.readouterr()
    assert not STEERING & set(written.out + written.err)


def test_rows_and_names_of_files_are(capsys: pytest.CaptureFixture[str]) -> None:
    Path("\x1b[31m.jsonl").write_text(json.dumps({"\x9b": "\u202e", "x": "\x1b]0;t\x07"}) + "\n")
    assert main(["data", "job.yaml", 'data="\\e[31m.jsonl"']) == 2
    Path("own.jsonl").write_text(json.dumps({"instruction": "\u202e\x1b[31m", "output": "\x9b"}) + "\n")
    assert main(["data", "job.yaml", "data=own.jsonl"]) == 0
    assert main(["data", "job.yaml", "data=own.jsonl", "--json"]) == 0
    written = capsys.readouterr()
    assert not STEERING & set(written.out + written.err) and "\\x1b[31m" in written.out


def test_rich_tables_are_and_keep_their_own_colours() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True)
    console.print("[bold]a[/bold] \x1b]0;title\x07\u202e", highlight=False)
    assert file.getvalue() == "\x1b[1ma\x1b[0m \\x1b]0;title\\u202e\n"


def test_output_that_cannot_be_written_is_one_error() -> None:
    ended = stoker("check job.yaml > /dev/full")
    assert (ended.returncode, ended.stderr) == (
        1,
        "error: standard output cannot be written: No space left on device\n",
    )
    assert stoker("check job.yaml 2>/dev/full >/dev/full").returncode == 1
    assert stoker("check nothing.yaml 2>/dev/full").returncode == 2
    assert stoker("check job.yaml >&-").returncode == 0
    ended = stoker("check job.yaml | head -1", "set -o pipefail; ")
    assert ended.stderr == "" and ended.stdout.startswith("version")


@pytest.mark.parametrize("needs_reader", [False, True])
def test_a_closed_pipe_ends_only_output_that_needs_a_reader(needs_reader: bool) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    stream = Output(os.fdopen(theirs, "w", buffering=1), needs_reader=needs_reader)
    with pytest.raises(BrokenPipeError) if needs_reader else nullcontext():
        stream.write("a line\n")
    os.dup2(2, theirs)  # it is closed without an error


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.often("1")
@pytest.mark.usefixtures("warm_processes")
def test_training_goes_on_where_the_reader_leaves(
    processes: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("my.jsonl").write_text('{"instruction": "a", "output": "b"}\n' * 8)
    command = [sys.executable, "-m", "stoker", "train", "job.yaml", f"parallel.data={processes}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout is not None and training.stdout.readline()
        training.stdout.close()
    assert training.returncode == 0
    assert main(["runs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["state"] == "done"


@pytest.mark.slow
def test_closed_streams_do_not_end_a_command() -> None:
    """The null device has their numbers: no other file does, and the processes of a run have all three."""
    Path("my.jsonl").write_text('{"instruction": "a", "output": "b"}\n' * 8)
    ended = stoker("train job.yaml train.seq_len=64 >&- <&-")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert stoker("chat runs/job <&-").returncode == 0  # no line is a conversation without questions


@pytest.mark.slow
def test_too_few_open_files_and_too_little_memory_are_told() -> None:
    ended = stoker("train job.yaml", "ulimit -n 12; ")
    assert ended.returncode == 1 and "too many files are open; this shell allows 12" in ended.stderr
    assert "Traceback" not in ended.stderr
    ended = stoker("train job.yaml", "ulimit -v 600000; ")
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1) and "there is not enough memory" in ended.stderr
    ended = stoker("data job.yaml", "ulimit -v 600000; ")
    assert ended.returncode == 1 and "there is not enough memory; this shell allows a process 0.6 GiB" in ended.stderr


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "there is not enough memory"),
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), "/x/y: the disk is full"),
        (OSError(errno.EMFILE, "Too many open files"), "too many files are open"),
        (ImportError("libtorch.so: failed to map segment from shared object"), "there is not enough memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 5 bytes"), "enough memory"),
    ],
)
def test_what_the_machine_lacks_is_told_and_bugs_are_raised(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: list[str]) -> int:
        raise error

    monkeypatch.setattr(command, "_run", fails)
    assert main([]) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: ") and said in told
    error = ValueError("a bug")
    with pytest.raises(ValueError, match="a bug"):
        main([])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_ended_removes_what_it_began(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_ended(_: list[str]) -> int:
        with TemporaryDirectory(prefix="begun", dir=tmp_path):
            signal.raise_signal(number)
        return 0

    monkeypatch.setattr(command, "_run", is_ended)
    before = signal.signal(number, signal.SIG_DFL)  # nohup ignores SIGHUP
    try:
        with pytest.raises(SystemExit) as ended:
            main([])
        assert ended.value.code == 128 + number
        assert not list(tmp_path.glob("begun*"))
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("where", ["/dev/full/x", "/proc/x"])
def test_a_cache_that_cannot_be_written_names_the_variable(
    where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STOKER_CACHE", where)
    assert main(["data", "job.yaml"]) == 1
    assert "the cache cannot be written" in (said := capsys.readouterr().err) and "set STOKER_CACHE" in said


def test_no_home_folder_names_the_variable(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("STOKER_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda _: (_ for _ in ()).throw(KeyError("no such user")))
    assert main(["data", "job.yaml"]) == 1
    assert "no home folder to keep a cache in; set STOKER_CACHE" in capsys.readouterr().err


def test_a_stream_passes_on_what_else_it_has() -> None:
    stream = Output(os.fdopen(os.dup(2), "w"))
    assert stream.fileno() > 2 and stream.isatty() in (True, False) and stream.unescaped.unescaped is stream.unescaped


def test_libraries_are_quiet_and_those_that_nobody_needs_are_not_waited_for() -> None:
    quiet = "import sys; from stoker.cli.output.quiet_libraries import quiet_libraries; quiet_libraries(); "
    quiet += "assert 'transformers' not in sys.modules; from transformers.utils import logging; "
    code = quiet + "sys.exit(logging.get_verbosity() != logging.ERROR or logging.is_progress_bar_enabled())"
    own = {name: value for name, value in os.environ.items() if not name.startswith(("TRANSFORMERS_", "HF_"))}
    fresh = [sys.executable, "-u", "-c", code]  # with another option first it is no copy of a warm process
    assert subprocess.run(fresh, env=own, check=False).returncode == 0


@pytest.mark.parametrize("ignored", [False, True])
def test_ctrl_c_while_the_process_ends_prints_nothing(ignored: bool) -> None:
    """As by a second Ctrl-C, which comes within torch's exit functions. A shell's background job ignores it."""
    code = "import atexit, os, signal, sys; from stoker.cli.main import main; sys.argv = ['stoker', '--version']; "
    code += "atexit.register(os.kill, os.getpid(), signal.SIGINT); "
    code += f"signal.signal(signal.SIGINT, signal.{'SIG_IGN' if ignored else 'default_int_handler'}); sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == (0 if ignored else -signal.SIGINT) and not done.stderr
