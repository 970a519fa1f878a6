"""A run, a checkpoint and a model of somebody else, opened with every verb that takes them: none of its code runs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from stoker.checkpoint.dcp_metadata import read_index
from stoker.checkpoint.storage import LocalStorage, read_state, write_state
from stoker.cli.main import main
from stoker.errors import UserError
from stoker.job.blocks.model_block import ModelBlock
from stoker.models.hf_config import config_of
from tiny_llama import save_tiny_llama

RUN = Path("runs/received")
MARK = Path("it-ran")
JOB = """task: sft
model: tiny
data: rows.jsonl
steps: 2
output: runs/received
train: {lr: 1e-2, batch: 4, seq_len: 64, precision: fp32}
evaluate: {fraction: 0.2, samples: 0}
checkpoint: {background: false, memory: 0}
faults: {restarts: 0, check: false}
"""
ESCAPE = "{{ cycler.__init__.__globals__.os.mkdir('it-ran') }}"
VERBS = {
    "chat": ["chat", "received", "--prompt", "How are you?", "--max-tokens", "1"],
    "eval": ["eval", "received", "rows.jsonl"],
    "export": ["export", "received", "--format", "merged", "--to", "exported"],
    "runs": ["runs", "received", "--json"],
    "plan": ["plan", "--from", str(RUN)],
    "check": ["check", str(RUN / "job.yaml")],
    "data": ["data", str(RUN / "job.yaml")],
    "train": ["train", str(RUN / "job.yaml"), "steps=3"],
    "verify": ["verify", str(RUN / "job.yaml")],
    "chaos": ["chaos", str(RUN / "job.yaml"), "--kill", "0@1"],
}


class Evil:
    """An object whose pickle makes a file when it is read."""

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (MARK.absolute(),)


@pytest.fixture(scope="module")
def made(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its data, and a run of two steps."""
    base = tmp_path_factory.mktemp("received")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    save_tiny_llama(base / "tiny", tokenizer, **sizes)
    rows = (json.dumps({"prompt": f"How are you? {i}", "completion": "I am well."}) for i in range(12))
    (base / "rows.jsonl").write_text("\n".join(rows) + "\n")
    (base / "job.yaml").write_text(JOB)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(base)
        assert main(["train", "job.yaml", "--json"]) == 0
    return base


@pytest.fixture
def base(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it to spoil."""
    shutil.copytree(made, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    monkeypatch.setenv("STOKER_CACHE", str(made.parent / "cache"))  # `plan --from` keeps what it learns there
    return tmp_path / "copy"


def attack(capsys: pytest.CaptureFixture[str], *verbs: str) -> dict[str, tuple[int, str]]:
    """Opens the run with verbs; gives each one's exit code and words. An exception is a traceback."""
    said = {}
    for verb in verbs or VERBS:
        capsys.readouterr()
        code = main(VERBS[verb])
        said[verb] = (code, capsys.readouterr().err)
        assert not MARK.exists() and "Traceback" not in said[verb][1], (verb, said[verb])
    return said


def checkpoint() -> Path:
    return RUN / "checkpoints" / "step-00000002"


def sign() -> None:
    """Gives the files of the checkpoint the sums that they should have, as whoever changed them could."""
    storage = LocalStorage(RUN / "checkpoints")
    state = read_state(storage, 2)
    for name in state["files"]:
        data = (checkpoint() / name).read_bytes()
        state["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (checkpoint() / "state.json").write_bytes(write_state(state))


def evil_index() -> None:
    (checkpoint() / ".metadata").write_bytes(pickle.dumps(Evil()))
    sign()


def evil_tensors() -> None:
    torch.save(Evil(), checkpoint() / "__0_0.distcp")
    index = read_index((checkpoint() / ".metadata").read_bytes(), ["__0_0.distcp"])
    for info in index.storage_data.values():
        info.offset, info.length = 0, (checkpoint() / "__0_0.distcp").stat().st_size
    (checkpoint() / ".metadata").write_bytes(pickle.dumps(index))
    sign()


def index_of_another_folder() -> None:
    shutil.copy(checkpoint() / "__0_0.distcp", RUN / "outside")  # what could be read there
    index = read_index((checkpoint() / ".metadata").read_bytes(), ["__0_0.distcp"])
    for info in index.storage_data.values():
        info.relative_path = "../../outside"
    (checkpoint() / ".metadata").write_bytes(pickle.dumps(index))
    sign()


def evil_state() -> None:
    (checkpoint() / "state.json").write_bytes(pickle.dumps(Evil()))


@pytest.mark.parametrize("plant", [evil_index, evil_tensors, index_of_another_folder, evil_state])
def test_a_checkpoint_runs_nothing(plant: Callable[[], None], base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(checkpoint().with_name("step-00000001"))
    plant()
    said = attack(capsys, "chat", "eval", "export", "train")
    assert all(code == 1 and "damaged" in words for code, words in said.values()), said
    assert checkpoint().is_dir()


@pytest.mark.parametrize(
    "name",
    [
        "events.jsonl",
        "metrics.jsonl",
        "repeated.jsonl",
        "environment.json",
        "plan.json",
        "job.yaml",
        "chaos/faults.json",
        "logs/rank-0.error.json",
    ],
)
@pytest.mark.parametrize("kind", ["pickle", "yaml"])
def test_a_file_of_a_run_runs_nothing(kind: str, name: str, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (RUN / name).parent.mkdir(exist_ok=True)
    tag = b"!!python/object/apply:os.mkdir [it-ran]\n"
    (RUN / name).write_bytes(pickle.dumps(Evil()) if kind == "pickle" else tag)
    attack(capsys, "chat", "runs", "plan", "check", "train")


# The verbs that read a file of the run, and stop where it is not a file.
READ_BY = {
    "job.yaml": [verb for verb in VERBS if verb != "plan"],
    "events.jsonl": ["chat", "eval", "export", "runs", "train"],
    "metrics.jsonl": ["chat", "eval", "export", "runs", "train"],
    "checkpoints/step-00000002/state.json": ["chat", "eval", "export", "train"],
    "environment.json": ["plan", "train"],
    "plan.json": ["train"],
}


def fifo(path: Path) -> str:
    os.mkfifo(path)
    return "FIFO"


def socket_file(path: Path) -> str:
    with socket.socket(socket.AF_UNIX) as opened, contextlib.chdir(path.parent):  # its path must be short
        opened.bind(path.name)
    return "socket"


@pytest.mark.parametrize("name", READ_BY)
@pytest.mark.parametrize("make", [fifo, socket_file])
def test_nothing_but_a_file_is_read(
    make: Callable[[Path], str], name: str, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A FIFO would be waited for without end."""
    if name.endswith("state.json"):
        shutil.rmtree(checkpoint().with_name("step-00000001"))
    (RUN / name).unlink()
    kind = make(RUN / name)
    said = attack(capsys, *READ_BY[name])
    assert all(code for code, _ in said.values()), said
    assert all(words.count(kind) == 1 or "No such device" in words for _, words in said.values()), said
    assert all(words.splitlines()[-1].startswith("error: ") for _, words in said.values()), said


def set_job(**changes: Any) -> None:
    """Changes keys of the run's own job.yaml."""
    lines = (RUN / "job.yaml").read_text()
    for key, value in changes.items():
        before = next(line for line in lines.splitlines() if line.strip().startswith(f"{key}:"))
        lines = lines.replace(before, before.split(":")[0] + f": {value}", 1)
    (RUN / "job.yaml").write_text(lines)


def evil_model(base: Path) -> None:
    """Modelling and tokenizer code beside the weights, of a kind that transformers does not know."""
    (base / "tiny" / "evil.py").write_text(f"open({str(base / MARK)!r}, 'w')\n")
    for name, classes in {
        "config.json": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
        "tokenizer_config.json": {"AutoTokenizer": [None, "evil.Tokenizer"]},
    }.items():
        path = base / "tiny" / name
        values = json.loads(path.read_text()) | {"auto_map": classes, "model_type": "evil"}
        values.pop("tokenizer_class", None)
        path.write_text(json.dumps(values))


@pytest.mark.parametrize("trusted", ["false", "true"])
def test_modelling_code_needs_this_users_word(trusted: str, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil_model(base)
    set_job(trust_remote_code=trusted)
    said = attack(capsys, *(verb for verb in VERBS if verb not in ("runs", "plan")))
    assert all(code == 2 for code, _ in said.values()), said
    assert main(["chat", "./tiny", *VERBS["chat"][2:], "--allow-pickle"]) == 2 and not MARK.exists()
    if trusted == "true":
        words = "model.trust_remote_code: true lets code run, and a run's own job.yaml does not decide that"
        assert all(words in message for _, message in said.values()), said
        assert "write --trust-remote-code" in said["chat"][1]
        assert "write model.trust_remote_code=true on the command line" in said["train"][1]
        main([*VERBS["chat"], "--trust-remote-code"])
        assert MARK.exists()  # the payload is a real one


def test_stages_of_a_run_are_trusted_no_more_than_one(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil_model(base)
    job = "task: sft\nmodel: {name: tiny, trust_remote_code: true}\ndata: rows.jsonl\nstages:\n- {name: a, steps: 1}\n"
    (RUN / "job.yaml").write_text(job)
    code, words = attack(capsys, "check")["check"]
    assert code == 2 and "a run's own job.yaml does not decide that" in words, words


def test_code_beside_a_tokenizer_alone_does_not_run(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (base / "tiny" / "evil.py").write_text(f"open({str(base / MARK)!r}, 'w')\n")
    path = base / "tiny" / "tokenizer_config.json"
    values = json.loads(path.read_text()) | {"auto_map": {"AutoTokenizer": [None, "evil.Tokenizer"]}}
    path.write_text(json.dumps(values))
    attack(capsys, "chat", "data")


@pytest.mark.parametrize("allowed", ["false", "true"])
def test_pickled_weights_need_this_users_word(allowed: str, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (base / "tiny" / "model.safetensors").unlink()
    torch.save(Evil(), base / "tiny" / "pytorch_model.bin")
    set_job(allow_pickle=allowed)
    said = attack(capsys, "chat", "eval", "check", "train")
    assert all(code == 2 for code, _ in said.values()), said
    assert ("write --allow-pickle" in said["chat"][1]) == (allowed == "true")


def test_an_adapter_beside_the_model_is_not_followed(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Transformers would load the model that the adapter names in place of the job's."""
    settings = {"peft_type": "LORA", "base_model_name_or_path": "somebody/else"}
    (base / "tiny" / "adapter_config.json").write_text(json.dumps(settings))
    torch.save(Evil(), base / "tiny" / "adapter_model.bin")
    attack(capsys, "chat", "train")
    (base / "tiny" / "model.safetensors").rename(base / "tiny" / "pytorch_model.bin")
    code = main(["train", "job.yaml", "model.allow_pickle=true", "output=runs/other"])
    assert code == 2 and "adapter_config.json" in capsys.readouterr().err and not MARK.exists()


def test_a_module_of_a_run_is_not_imported(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = {"model": "evil:model", "loss": "evil:loss", "data": "evil:data"}
    (RUN / "job.yaml").write_text(f"task: module\nmodule: {json.dumps(code)}\nsteps: 2\noutput: {RUN}\n")
    (base / "evil.py").write_text(f"open({str(base / MARK)!r}, 'w')\n")
    said = attack(capsys, "chat", "check", "train", "verify", "chaos")
    assert all(code == 2 for code, _ in said.values())
    assert "write task=module on the command line" in said["train"][1]


@pytest.mark.parametrize("left", ["events.jsonl", "plan.json", ".lock", "checkpoints/step-00000002", "logs/rank-0.log"])
def test_a_run_without_its_records_is_still_a_run(left: str, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever made it can leave out most of what tells that a run wrote its job.yaml."""
    shutil.rmtree(RUN)
    (RUN / left).parent.mkdir(parents=True, exist_ok=True)
    (RUN / left).symlink_to("nowhere")
    code = {"model": "evil:model", "loss": "evil:loss", "data": "evil:data"}
    (RUN / "job.yaml").write_text(f"task: module\nmodule: {json.dumps(code)}\nsteps: 2\noutput: runs/other\n")
    (base / "evil.py").write_text(f"open({str(base / MARK)!r}, 'w')\n")
    (base / "job.yaml").unlink()
    (base / "job.yaml").symlink_to(RUN / "job.yaml")
    for verb in ("check", "train", "verify", "chaos"):
        assert attack(capsys, verb)[verb][0] == 2
        assert main([verb, "job.yaml", *VERBS[verb][2:]]) == 2 and not MARK.exists()


@pytest.mark.slow
def test_faults_that_come_with_a_run_write_through_no_link(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = base / "mine"
    mine.write_bytes(bytes(range(256)) * 1000)
    (checkpoint() / "large").symlink_to(mine)
    state = read_state(LocalStorage(RUN / "checkpoints"), 2)
    state["files"]["large"] = {}
    (checkpoint() / "state.json").write_bytes(write_state(state))
    sign()
    (RUN / "chaos").mkdir()
    faults = [{"kind": "slow", "step": 3, "factor": 1.0}, {"kind": "corrupt", "step": 3}]
    (RUN / "chaos" / "faults.json").write_text(json.dumps(faults))
    (RUN / "chaos" / "happened-0").symlink_to(base / "made")
    main([*VERBS["train"], "faults.restarts=1"])
    assert "chaos" in (RUN / "events.jsonl").read_text()
    assert mine.read_bytes() == bytes(range(256)) * 1000 and not (base / "made").exists()


def test_a_template_of_a_run_is_in_a_sandbox(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (RUN / "template.jinja").write_text(ESCAPE + "{{ messages[0].content }}")
    set_job(template=str(RUN / "template.jinja"))
    said = attack(capsys, "chat", "data")
    assert all(code for code, _ in said.values()), said


def test_checkpoints_are_not_read_through_a_chain_of_file_systems(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (base / "references.json").write_text(json.dumps({"version": 1, "templates": {"a": ESCAPE}, "refs": {}}))
    job = (RUN / "job.yaml").read_text()
    chain = f"  to: reference://::file://{base}/references.json\n"
    (RUN / "job.yaml").write_text(job.replace("checkpoint:\n", f"checkpoint:\n{chain}"))
    said = attack(capsys, "chat", "train")
    assert all("cannot hold checkpoints" in words for _, words in said.values()), said


def test_a_configuration_that_names_a_kernel_of_the_hub_is_refused(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = base / "tiny" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attn_implementation": "somebody/kernel"}))
    code, words = attack(capsys, "chat")["chat"]
    assert code == 2 and "asks for code from the hub, somebody/kernel" in words


@pytest.mark.parametrize(
    "content",
    [
        {"model_type": "gemma3", "attn_implementation": {"text_config": "somebody/kernel"}},
        {"model_type": "gemma3", "attn_implementation": {"vision_config": "somebody/kernel"}},
        {"model_type": "mixtral", "experts_implementation": "somebody/kernel"},
    ],
)
def test_a_configuration_that_names_a_kernel_for_a_part_is_refused(content: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="asks for code from the hub, somebody/kernel"):
        config_of(str(tmp_path), ModelBlock(name="gemma"))


@pytest.mark.parametrize("name", ["load", "os.system", "Size.__class__"])
def test_an_index_is_made_of_its_own_classes_only(name: str) -> None:
    module = "torch"
    by_name = b"\x80\x04\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(name)]) + name.encode()
    with pytest.raises(pickle.UnpicklingError, match="which is no part of an index"):
        read_index(by_name + b"\x93.", [])
