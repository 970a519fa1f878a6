"""Adapters over one base: from folders and runs, and folders that are wrong or hostile."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from serving import InProcess, in_process
from torch import nn
from transformers import AutoTokenizer

from stoker.checkpoint.load_run import TunedRun
from stoker.errors import UserError
from stoker.generate import open_model
from stoker.generate.open_model import OpenModel, of_tuned
from stoker.job.load_job import load_job
from stoker.serve.served_models.load_adapter import _same_base
from stoker.serve.served_models.open_served import open_served

ASKED = [{"role": "user", "content": "Who is 3?"}]


def text(served: InProcess, model: str) -> str:
    body = {"model": model, "messages": ASKED, "max_tokens": 10, "temperature": 0}
    reply = served.post("/v1/chat/completions", body)
    assert reply.status == 200, reply.body
    return str(reply.json["choices"][0]["message"]["content"])


def scores(served: InProcess, model: str) -> list[float]:
    body = {"model": model, "messages": ASKED, "max_tokens": 10, "temperature": 0, "logprobs": True}
    (choice,) = served.post("/v1/chat/completions", body).json["choices"]
    return [token["logprob"] for token in choice["logprobs"]["content"]]


def test_a_folder_over_its_base_answers_as_the_run(
    served: InProcess, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    with in_process(home, ["plain=tiny", "adapter", "again=adapter"]) as folder:
        assert [(model.name, model.parent) for model in folder.service.models] == [
            ("plain", None),
            ("adapter", "tiny"),
            ("again", "tiny"),
        ]
        assert len(folder.service.models.hosts) == 1
        assert text(folder, "adapter") == text(folder, "again") == text(served, "second")
        assert text(folder, "plain") == text(served, "tiny")


def test_a_base_in_memory_is_served_under_every_name_that_is_given(home: Path) -> None:
    with in_process(home, ["tuned=adapter", "tiny", "base=tiny", "other=tiny"]) as served:
        assert [model.name for model in served.service.models] == ["tuned", "tiny", "base", "other"]
        assert len(served.service.models.hosts) == 1
    with pytest.raises(UserError, match="'tuned'"):
        open_served(["tuned=adapter", "tuned=tiny"], home)


def test_adapters_over_a_plain_model_leave_it_as_it_was(home: Path) -> None:
    with in_process(home, ["tiny"]) as plain:
        before = text(plain, "tiny")
        for _ in range(2):  # the memory of the first is free for the second
            load = {"lora_name": "late", "lora_path": str(home / "adapter")}
            assert plain.post("/v1/load_lora_adapter", load).status == 200
            assert text(plain, "late") != before == text(plain, "tiny")
            assert plain.post("/v1/unload_lora_adapter", {"lora_name": "late"}).json["deleted"] is True
            assert text(plain, "tiny") == before
            host = plain.service.models.find("tiny").host
            assert not any(".served" in name for name, _ in host.engine.decoder.model.named_parameters())


@pytest.mark.parametrize(
    ("trained", "own"), [("tiny", None), ("org/other", None), ("org/other", "tiny"), ("tiny", "org/other")]
)
def test_an_adapter_over_a_base_of_another_name_is_said_to_be(
    served: InProcess, home: Path, tmp_path: Path, trained: str, own: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(home / "adapter", tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": trained}))
    if own is not None:  # Stoker's own file is right where peft's names the hub's similar model
        (folder / "stoker.json").write_text(json.dumps({"base": own}))
    load = {"lora_name": "late", "lora_path": str(folder), "base_model_name": "one"}
    assert served.post("/v1/load_lora_adapter", load).status == 200
    assert served.post("/v1/unload_lora_adapter", {"lora_name": "late"}).status == 200
    said = "late was trained over 'org/other', and is served over tiny\n"
    assert capsys.readouterr().err == (said if (own or trained) == "org/other" else "")


def test_an_error_of_the_base_that_an_adapter_names_tells_of_base(home: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(home / "adapter", tmp_path / "adapter")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{")
    config = json.loads((folder / "adapter_config.json").read_text())
    damaged = {"base_model_name_or_path": str(tmp_path / "damaged")}
    (folder / "adapter_config.json").write_text(json.dumps(config | damaged))
    with pytest.raises(UserError, match="; name the base with --base MODEL"):
        open_served([str(folder)], home)
    with pytest.raises(UserError, match="damaged") as named:
        open_served([str(folder)], home, base=str(tmp_path / "damaged"))
    assert "--base" not in str(named.value)


def test_adapters_of_the_command_line_are_unloaded_and_come_back(home: Path, recwarn: pytest.WarningsRecorder) -> None:
    with in_process(home, ["one", "second=two", "full"]) as served:
        before = {name: text(served, name) for name in ("one", "second", "tiny", "full")}
        assert len(set(before.values())) == 4
        for gone in ("one", "second"):  # the first has no other name in memory, the last leaves a plain model
            assert served.post("/v1/unload_lora_adapter", {"lora_name": gone}).json["deleted"] is True
            left = [model.name for model in served.service.models if model.parent is not None]
            assert gone not in left and {name: text(served, name) for name in left} == {
                name: before[name] for name in left
            }
            assert text(served, "tiny") == before["tiny"]
        for name, run in (("second", "two"), ("one", "one")):
            load = {"lora_name": name, "lora_path": str(home / "runs" / run)}
            assert served.post("/v1/load_lora_adapter", load).status == 200
        assert {name: text(served, name) for name in before} == before
        assert not [str(warning.message) for warning in recwarn if "active" in str(warning.message)]
        for stays in ("tiny", "full"):
            refused = served.post("/v1/unload_lora_adapter", {"lora_name": stays})
            assert refused.status == 400 and "not an adapter, and cannot be unloaded" in refused.error["message"]


def test_a_run_is_not_loaded_over_another_base_than_the_one_that_is_named(served: InProcess, home: Path) -> None:
    run = str(home / "runs" / "two")
    for base, status in (("full", 400), ("nothing", 404), ("one", 200), ("tiny", 200)):
        load = {"lora_name": f"over-{base}", "lora_path": run, "base_model_name": base}
        reply = served.post("/v1/load_lora_adapter", load)
        assert reply.status == status, base
        if status == 200:
            assert reply.json["parent"] == "tiny" and text(served, f"over-{base}") == text(served, "second")
            assert served.post("/v1/unload_lora_adapter", {"lora_name": f"over-{base}"}).status == 200
        elif status == 400:
            assert reply.error["param"] == "base_model_name"
            assert reply.error["message"].endswith("two was trained over tiny, not over full")


def test_an_adapter_is_loaded_over_one_base_by_its_name_and_once(served: InProcess, home: Path) -> None:
    load = {"lora_name": "late", "lora_path": str(home / "adapter")}
    refused = served.post("/v1/load_lora_adapter", load)
    assert refused.status == 400 and refused.error["param"] == "base_model_name"
    assert refused.error["message"] == "several bases are served: write base_model_name, one of tiny, full"
    host = served.service.models.find("one").host
    before = len(host.engine.decoder.model.peft_config)  # type: ignore[arg-type]

    async def twice() -> list[Any]:
        named = load | {"base_model_name": "one"}
        return await asyncio.gather(*(served.ask("POST", "/v1/load_lora_adapter", named) for _ in range(2)))

    replies = asyncio.run(twice())
    assert sorted(reply.status for reply in replies) == [200, 400]
    assert len(host.engine.decoder.model.peft_config) == before + 1  # type: ignore[arg-type]
    assert served.post("/v1/unload_lora_adapter", {"lora_name": "late"}).status == 200
    assert len(host.engine.decoder.model.peft_config) == before  # type: ignore[arg-type]


def test_an_adapter_is_unloaded_when_its_requests_have_ended(home: Path) -> None:
    asked = {"model": "one", "prompt": "Who", "max_tokens": 120, "min_tokens": 120, "temperature": 0}

    async def both() -> None:
        alone = (await served.ask("POST", "/v1/completions", asked)).json["choices"]
        running = asyncio.ensure_future(served.ask("POST", "/v1/completions", asked))
        while not served.service.models.find("one").host.engine.running:
            await asyncio.sleep(0.001)
        gone = await served.ask("POST", "/v1/unload_lora_adapter", {"lora_name": "one"})
        assert gone.status == 200 and running.done() and running.result().json["choices"] == alone

    with in_process(home, ["one"]) as served:
        asyncio.run(both())


def test_runs_share_a_base_only_with_the_same_weights_and_arithmetic(home: Path) -> None:
    one = load_job(home / "one.yaml")
    dense, mixture = nn.Linear(2, 2), nn.Module()
    mixture.num_experts, mixture.up = 4, nn.Parameter(torch.zeros(4, 2, 2))  # type: ignore[assignment]
    for model in (dense, nn.Sequential(mixture)):
        assert _same_base(model, one, load_job(home / "two.yaml"))
        for other in ("model=full", "seed=1", "train.precision=bf16"):
            assert not _same_base(model, one, load_job(home / "one.yaml", [other]))
    targets = load_job(home / "one.yaml", ["tune={method: lora, targets: [q_proj]}"])
    assert _same_base(dense, one, targets) and not _same_base(nn.Sequential(mixture), one, targets)


def test_scaling_and_rank_of_each_layer_are_those_of_the_folder(served: InProcess, home: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(home / "adapter", tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    weights = load_file(folder / "adapter_model.safetensors")
    rank, scaling = config["r"], config["lora_alpha"] / config["r"]
    for name, weight in weights.items():
        if "v_proj" in name:  # two further ranks without effect
            pad = (0, 0, 0, 2) if "lora_A" in name else (0, 2)
            weights[name] = torch.nn.functional.pad(weight, pad).contiguous()
    save_file(weights, folder / "adapter_model.safetensors")
    config |= {"use_rslora": True, "lora_alpha": scaling * rank**0.5}
    config["alpha_pattern"] = {"v_proj": scaling * (rank + 2) ** 0.5}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    load = {"lora_name": "late", "lora_path": str(folder), "base_model_name": "one"}
    assert served.post("/v1/load_lora_adapter", load).status == 200
    assert scores(served, "late") == pytest.approx(scores(served, "second"), abs=1e-4)
    assert served.post("/v1/unload_lora_adapter", {"lora_name": "late"}).status == 200


def test_a_base_at_a_url_that_an_adapter_names_is_not_fetched(home: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(home / "adapter", tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    at_url = {"base_model_name_or_path": "http://127.0.0.1:9/model"}
    (folder / "adapter_config.json").write_text(json.dumps(config | at_url))
    with pytest.raises(UserError, match="which is not here; name the base with --base MODEL"):
        open_served([str(folder)], home)


@pytest.mark.parametrize("path", ["/nowhere", "a" * 4000, "nul\0byte", "~nobody-of-this-name/adapter", "/etc/hostname"])
def test_a_path_without_a_folder_is_refused(served: InProcess, path: str) -> None:
    load = {"lora_name": "late", "lora_path": path, "base_model_name": "one"}
    reply = served.post("/v1/load_lora_adapter", load)
    assert reply.status == 400 and reply.error["message"].startswith("there is no folder '")


def hostile(folder: Path, name: str) -> None:
    """Makes an adapter's folder wrong in one way."""
    config = json.loads((folder / "adapter_config.json").read_text())
    weights = load_file(folder / "adapter_model.safetensors")
    first = sorted(weights)[0]
    changes: dict[str, Any] = {
        "type": {"peft_type": "IA3"},
        "task": {"task_type": "SEQ_CLS"},
        "whole": {"modules_to_save": ["lm_head"]},
        "alpha": {"lora_alpha": "1e99"},
        "pattern": {"alpha_pattern": {"(a+)+$": 1}},
        "pissa": {"init_lora_weights": "pissa_niter_4"},
        "alora": {"alora_invocation_tokens": [1, 2]},
        "copies": {"layer_replication": [[0, 1]]},
        "infinite": {"lora_alpha": float("inf")},
        "no number": {"lora_alpha": float("nan")},
        "large": {"revision": "a" * (1 << 20)},
    }
    (folder / "adapter_config.json").write_text(json.dumps(config | changes.get(name, {})))
    if name == "pickle":
        (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    if name == "shape":
        weights[first] = torch.zeros(3, 5)
    if name == "layer":
        weights[first.replace("layers.0", "layers.7")] = weights.pop(first)
    if name == "extra":
        weights["base_model.model.lm_head.weight"] = torch.zeros(4, 4)
    if name == "head":
        weights |= {f"base_model.model.lm_head.lora_{matrix}.weight": torch.zeros(2, 2) for matrix in "AB"}
    if name in ("lora_A", "lora_B"):
        del weights[next(key for key in sorted(weights) if name in key)]
    if name == "nan":
        weights[first] = weights[first] * float("nan")
    if name == "rank":
        for key, weight in weights.items():
            weights[key] = (weight[:0] if "lora_A" in key else weight[:, :0]).contiguous()
    if name == "scalar":
        weights[first] = torch.zeros(())
    if name in ("shape", "layer", "extra", "head", "lora_A", "lora_B", "nan", "rank", "scalar"):
        save_file(weights, folder / "adapter_model.safetensors")
    if name == "damaged":
        (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 100)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("type", "type IA3"),
        ("task", "task SEQ_CLS"),
        ("whole", "modules_to_save"),
        ("alpha", "lora_alpha"),
        ("pattern", "alpha_pattern"),
        ("pissa", "path_initial_model_for_weight_conversion"),
        ("alora", "alora_invocation_tokens"),
        ("copies", "layer_replication"),
        ("infinite", "lora_alpha is not a number"),
        ("no number", "lora_alpha is not a number"),
        ("large", "too large for a configuration"),
        ("head", "it has no layer lm_head that can be adapted"),
        ("pickle", "safetensors"),
        ("shape", "does not fit"),
        ("layer", "not a plain LoRA adapter: it lacks base_model.model.model.layers.0."),
        ("extra", "not a plain LoRA adapter: it has base_model.model.lm_head.weight"),
        ("lora_A", "not a plain LoRA adapter: it lacks base_model.model.model.layers.0."),
        ("lora_B", "not a plain LoRA adapter: it lacks base_model.model.model.layers.0."),
        ("nan", "not finite"),
        ("rank", "rank 0"),
        ("scalar", "rank 0"),
        ("damaged", "cannot be read"),
    ],
)
def test_wrong_folders_are_refused_and_the_rest_goes_on(
    served: InProcess, home: Path, tmp_path: Path, name: str, says: str
) -> None:
    before = text(served, "one")
    shutil.copytree(home / "adapter", tmp_path / "wrong")
    hostile(tmp_path / "wrong", name)
    load = {"lora_name": "wrong", "lora_path": str(tmp_path / "wrong"), "base_model_name": "one"}
    reply = served.post("/v1/load_lora_adapter", load)
    assert reply.status == 400 and says in reply.error["message"]
    assert text(served, "one") == before
    assert "wrong" not in served.service.models


@pytest.mark.filterwarnings("error")
def test_numerators_of_layers_that_it_does_not_adapt_have_no_effect(
    served: InProcess, home: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(home / "adapter", tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"alpha_pattern": {"nowhere": 4.0}}))
    load = {"lora_name": "late", "lora_path": str(folder), "base_model_name": "one"}
    assert served.post("/v1/load_lora_adapter", load).status == 200
    assert text(served, "late") == text(served, "second")
    assert served.post("/v1/unload_lora_adapter", {"lora_name": "late"}).status == 200


def test_an_adapters_configuration_imports_nothing(served: InProcess, home: Path, tmp_path: Path) -> None:
    """peft imports the module that ``megatron_core`` names."""
    shutil.copytree(home / "adapter", tmp_path / "odd")
    file = tmp_path / "odd" / "adapter_config.json"
    odd = {"megatron_config": {"a": 1}, "megatron_core": "antigravity", "init_lora_weights": "gaussian"}
    file.write_text(
        json.dumps(json.loads(file.read_text()) | odd | {"auto_mapping": {"parent_library": "antigravity"}})
    )
    before = text(served, "tiny")
    load = {"lora_name": "odd", "lora_path": str(tmp_path / "odd"), "base_model_name": "one"}
    assert served.post("/v1/load_lora_adapter", load).status == 200
    import sys

    assert "antigravity" not in sys.modules
    assert text(served, "odd") == text(served, "second") and text(served, "tiny") == before
    assert served.post("/v1/unload_lora_adapter", {"lora_name": "odd"}).status == 200


def test_an_adapter_of_few_layers_answers_after_one_of_all_is_unloaded(home: Path, tmp_path: Path) -> None:
    few = shutil.copytree(home / "adapter", tmp_path / "few")
    weights = load_file(few / "adapter_model.safetensors")
    save_file({name: w for name, w in weights.items() if "v_proj" in name}, few / "adapter_model.safetensors")
    with in_process(home, ["one", "tiny"]) as served:
        load = {"lora_name": "few", "lora_path": str(few)}
        assert served.post("/v1/load_lora_adapter", load).status == 200
        before = text(served, "few")
        assert served.post("/v1/unload_lora_adapter", {"lora_name": "one"}).status == 200
        assert text(served, "few") == before


def test_a_base_stays_when_its_name_is_taken(home: Path) -> None:
    with in_process(home, ["tiny", "one"]) as served:
        before = text(served, "one")
        assert [model.name for model in served.service.models] == ["tiny", "one", "tiny@one"]
        assert text(served, "tiny@one") == text(served, "tiny")
        assert served.post("/v1/unload_lora_adapter", {"lora_name": "one"}).status == 200
        load = {"lora_name": "one", "lora_path": str(home / "runs" / "one")}
        assert served.post("/v1/load_lora_adapter", load).status == 200
        assert text(served, "one") == before
        page = served.get("/metrics").body.decode()
        assert 'stoker_answers_running{base="tiny"}' in page and 'stoker_answers_running{base="tiny@one"}' in page


def test_the_base_of_a_run_is_served_under_every_name_that_is_given(home: Path) -> None:
    models = open_served(["one", "tiny", "base=tiny"], home)
    assert [model.name for model in models] == ["one", "tiny", "base"] and len(models.hosts) == 1


def test_a_base_has_the_texts_of_its_files_in_any_order(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_other_stops(tuned: TunedRun, base: Path) -> OpenModel:
        opened = of_tuned(tuned, base)
        return replace(opened, codec=replace(opened.codec, stop_ids=frozenset({9})), chats=False)

    monkeypatch.setattr(open_model, "of_tuned", with_other_stops)
    orders = (["one", "tiny", "base=tiny"], ["one", "base=tiny", "tiny"], ["base=tiny", "one", "tiny"])
    for order in orders:
        models = {model.name: model.opened for model in open_served(order, home)}
        assert models["one"].codec.stop_ids == {9} and not models["one"].chats
        for name in ("tiny", "base"):
            assert models[name].codec.stop_ids != {9} and models[name].chats and models[name].run is None


def test_an_adapter_without_a_tokenizer_has_that_of_the_base(home: Path, tmp_path: Path) -> None:
    first = shutil.copytree(home / "adapter", tmp_path / "first")
    plain = shutil.copytree(home / "adapter", tmp_path / "plain")
    (plain / "tokenizer.json").unlink()
    tokenizer = AutoTokenizer.from_pretrained(first)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(first)
    other = shutil.copytree(first, tmp_path / "other")
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(other)
    with in_process(home, [str(first)]) as served:
        load = {"lora_name": "plain", "lora_path": str(plain)}
        assert served.post("/v1/load_lora_adapter", load).status == 200
        refused = served.post("/v1/load_lora_adapter", {"lora_name": "other", "lora_path": str(other)})
        assert refused.status == 400 and "its tokenizer has other tokens than the base" in refused.error["message"]
        found = {model.name: model.opened.codec.template.source for model in served.service.models}
    assert found["first"] == tokenizer.chat_template and found["plain"] == found["tiny"] != found["first"]
