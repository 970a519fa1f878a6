"""What `auto` becomes, and where every leaf of a job says it came from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from stoker.job import LoadedJob, ResolvedJob, load_job
from stoker.job.block import Block
from stoker.job.keys.annotations import block_of, choices
from stoker.job.keys.key_paths import dotted, leaves, schema_paths
from stoker.job.resolution.default_reasons import UNDECIDED

SFT = "task: sft\nmodel: smollm2-135m\ndata: my.jsonl\n"
SCRATCH = "task: pretrain\nmodel: llama-10m\ndata: sotu\n"
GOES_ON = "task: pretrain\nmodel: smollm2-135m\ndata: sotu\n"
MODULE = "task: module\nmodule: {model: 'a:b', loss: 'a:b', data: 'a:b'}\n"


def load(folder: Path, text: str, *overrides: str) -> LoadedJob:
    path = folder / "mine.yaml"
    path.write_text(text)
    return load_job(path, overrides)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # lr, beta2, weight_decay, seq_len, pack, batch, micro_batch
        (SFT, (2e-5, 0.999, 0.01, 1024, False, 8, 8)),
        (SFT + "tune: lora\n", (2e-4, 0.999, 0.01, 1024, False, 8, 8)),
        (SFT + "tune: qlora\n", (2e-4, 0.999, 0.01, 1024, False, 8, 8)),
        (SCRATCH, (1e-3, 0.95, 0.1, 512, True, 16, 16)),
        (GOES_ON, (1e-4, 0.95, 0.1, 1024, True, 16, 8)),
        (GOES_ON.replace("smollm2-135m", "llama-mine"), (1e-4, 0.95, 0.1, 1024, True, 16, 8)),  # a folder of weights
        (MODULE, (1e-3, 0.999, 0.0, 1024, False, 8, 8)),
        (
            SFT + "train: {lr: 1, beta2: 0.5, weight_decay: 2, seq_len: 4096, pack: true}\n",
            (1, 0.5, 2, 4096, True, 8, 2),
        ),
    ],
)
def test_values_of_the_tasks(tmp_path: Path, text: str, expected: tuple[float, ...]) -> None:
    train = load(tmp_path, text).job.train
    found = (
        train.lr,
        train.beta2,
        train.weight_decay,
        train.seq_len,
        train.pack,
        train.batch,
        train.micro_batch,
    )
    assert found == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SFT, {"epochs": 1.0, "steps": None, "evaluate.every": "auto", "checkpoint.every": "auto"}),
        (SFT + "steps: 200\n", {"epochs": None, "evaluate.every": 20, "checkpoint.every": 40}),
        (SFT + "steps: 3\n", {"evaluate.every": 1, "checkpoint.every": 1}),
        (SFT + "steps: 90000\n", {"evaluate.every": 9000, "checkpoint.every": 500}),
        (
            SFT,
            {"evaluate.fraction": 0.05, "output": "runs/mine", "parallel.data": 1, "train.precision": "auto"},
        ),
        (SFT + "evaluate: {data: x}\n", {"evaluate.fraction": 0.0, "evaluate.data[0].too_long": "cut"}),
        (MODULE, {"evaluate.fraction": 0.0}),
        (SFT + "tune: qlora\n", {"model.quantise": "4bit", "tune.alpha": 32}),
        (SFT + "tune: {method: lora, rank: 3}\n", {"tune.alpha": 6, "model.quantise": "none"}),
        (SCRATCH, {"data[0].too_long": "split"}),
        (SFT, {"data[0].too_long": "cut", "data[0].format": "auto", "data[0].stream": "auto"}),
        (SFT + "parallel: {data: 4}\ntrain: {batch: 64, micro_batch: 4}\n", {"train.accumulation": 4}),
        (SFT + "train: {batch: 64, micro_batch: 4, accumulation: 4}\n", {"parallel.data": 4}),
        (SFT + "train: {micro_batch: 2, accumulation: 4}\n", {"train.batch": 8}),
        (SFT + "tune: lora\ntrain: {lr: auto}\n", {"train.lr": 2e-4}),
    ],
)
def test_values_by_key(tmp_path: Path, text: str, expected: dict[str, object]) -> None:
    job = load(tmp_path, text).job
    values = {dotted(path): value for path, value in leaves(job)}
    assert {key: values[key] for key in expected} == expected


@pytest.mark.parametrize("text", [SFT, SFT + "tune: qlora\nsteps: 9\nevaluate: {data: [a, b]}\n", SCRATCH, MODULE])
def test_every_leaf_has_an_origin_and_every_default_a_reason(tmp_path: Path, text: str) -> None:
    loaded = load(tmp_path, text, "train.clip=0.5")
    written = {dotted(path) for path, _ in leaves(loaded.job)}
    assert set(loaded.origins) == written
    lines = text.splitlines()
    for key, origin in loaded.origins.items():
        if origin.source == "default":
            assert origin.why, key
            assert origin.where == "", key
        elif origin.source == "override":
            assert (key, origin.where) == ("train.clip", "train.clip=0.5")
        else:
            file, line, column = origin.where.rsplit(":", 2)
            assert file == str(tmp_path / "mine.yaml")
            assert 0 < int(column) <= len(lines[int(line) - 1])
    assert loaded.origins["task"].where.endswith("mine.yaml:1:7")


def test_a_written_auto_has_a_place_and_a_reason(tmp_path: Path) -> None:
    origin = load(tmp_path, SFT + "train:\n  lr: auto\n  precision: auto\n").origins
    assert (origin["train.lr"].source, origin["train.lr"].why) == (
        "default",
        "auto: full tuning of trained weights",
    )
    assert origin["train.lr"].where.endswith("mine.yaml:5:7")
    assert "device" in origin["train.precision"].why


def test_reasons_name_the_numbers_they_come_from(tmp_path: Path) -> None:
    origins = load(tmp_path, SFT + "steps: 50\ntrain: {batch: 12, micro_batch: 3}\n").origins
    assert origins["train.accumulation"].why == "batch / (micro_batch x parallel.data) = 12 / 3"
    assert origins["evaluate.every"].why == "a tenth of the 50 steps"
    assert origins["parallel.data"].why == "one process"


def test_auto_is_a_name_where_nothing_is_decided(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("task: pretrain\nmodel: auto\ndata: auto\noutput: auto\nsteps: 1\n")
    found = load_job(tmp_path / "job.yaml")
    assert (found.job.output, found.origins["output"].source) == ("auto", "file")


def left_open(block: type[Block], parent: str = "") -> Iterator[str]:
    """Keys that may be `auto` in a block, as `UNDECIDED` names them; those of a target are decided when it is used."""
    for name, field in block.model_fields.items():
        inner, _ = block_of(field.annotation)
        if name == "target":
            continue
        if inner is not None:
            yield from left_open(inner, "data." if name == "data" else f"{parent}{name}.")
        elif "auto" in choices(field.annotation):
            yield f"{parent}{name}"


def test_a_resolved_job_leaves_open_what_is_decided_later_and_nothing_else() -> None:
    assert {*left_open(ResolvedJob), "data.template"} == set(UNDECIDED)  # a template may be any text
    assert list(schema_paths(ResolvedJob)) == list(schema_paths())


def test_a_resolved_job_refuses_an_open_value(tmp_path: Path) -> None:
    data = load(tmp_path, SFT).job.model_dump()
    data["train"]["batch"] = data["parallel"]["data"] = "auto"
    with pytest.raises(ValidationError) as error:
        ResolvedJob.model_validate(data)
    assert [found["loc"] for found in error.value.errors()] == [("train", "batch"), ("parallel", "data")]
