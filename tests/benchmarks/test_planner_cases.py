"""Rows of a table of runs: what they mean, their defaults, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from planner_cases import main
from planner_runs.cases import predict, setting_of
from planner_runs.rows import read_rows

from stoker.errors import UserError
from stoker.plan.time.flop import model_flop_per_token

ROW: dict[str, Any] = {
    "row_id": 7, "source": "a run of Megatron", "model_name": "GPT", "layers": 24, "hidden": 2048, "heads": 16,
    "kv_heads": 16, "ffn": 8192, "vocab": 50257, "seq_len": 2048, "gpu": "A100-80GB-SXM", "num_gpus": 16,
    "tp": 2, "pp": 2, "dp": 4,
    "micro_batch": 2, "global_batch": 64, "recompute": "none", "precision": "bf16", "zero_stage": 1, "group": "g",
}  # fmt: skip


def test_a_row_is_a_setting() -> None:
    setting = setting_of(ROW)
    layout = setting.layout
    assert (layout.data, layout.tensor, layout.pipeline, layout.shard, layout.shard_size) == (4, 2, 2, "zero1", 4)
    assert setting.micro_batches == 8 and setting.cluster.gpus == 16 and layout.world == 16
    assert setting.shape.layers == 24 and setting.shape.width == 2048


def test_what_is_not_stated_has_defaults() -> None:
    setting = setting_of({"model_name": "llama3-8b", "gpu": "H100", "num_gpus": 8})
    assert setting.layout.data == 8 and setting.work.seq_len == 2048 and setting.micro_batches == 1
    assert setting.work.precision == "bf16" and setting.layout.recompute == "none"
    assert setting_of({"model_name": "gpt2", "gpu": "V100"}).work.precision == "fp16"


def test_the_prediction_is_consistent() -> None:
    found = predict(ROW)
    assert (
        found.step_time_s and found.tokens_per_s_per_gpu and found.mfu and found.memory_gib and found.memory_upper_gib
    )
    assert found.tokens_per_s_per_gpu * 16 * found.step_time_s == pytest.approx(64 * 2048)
    flop = model_flop_per_token(setting_of(ROW).shape, seq_len=2048)
    assert found.mfu == pytest.approx(found.tokens_per_s_per_gpu * flop / 312e12)
    assert 0 < found.mfu < 1 and found.memory_gib < found.memory_upper_gib and found.verdict == "FITS"


def test_cases_and_ranks_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [ROW, {**ROW, "row_id": 8, "micro_batch": 1}, {**ROW, "row_id": 9, "recompute": "full"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out.jsonl")]) == 0
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    keys = ["row_id", "memory_gib", "memory_upper_gib", "step_time_s", "tokens_per_s_per_gpu", "mfu", "verdict"]
    assert [list(row) for row in written] == [keys] * 3 and [row["row_id"] for row in written] == [7, 8, 9]
    assert written[2]["memory_gib"] < written[0]["memory_gib"] and written[2]["step_time_s"] > written[0]["step_time_s"]
    assert main(["--rank", str(tmp_path / "rows.jsonl")]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    order = sorted(written, key=lambda row: -row["tokens_per_s_per_gpu"])
    assert json.loads(line)["row_ids"] == [row["row_id"] for row in order]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"gpu": "H100", "model_name": "gpt2"}\n{"gpu"', "rows.jsonl:2:7: is not JSON"),
        ("[1]", "rows.jsonl:1: is not a JSON object"),
        ('{"model_name": "gpt2", "gpu": "H1000"}', "rows.jsonl:1: `H1000` is not a device"),
    ],
)
def test_bad_rows_are_named_and_nothing_is_written(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    assert main([str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out.jsonl")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_a_row_that_says_too_little_has_nulls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text(f'{json.dumps(ROW)}\n{{"row_id": 8, "gpu": "H1000"}}')
    assert main([str(tmp_path / "rows.jsonl")]) == 0
    said = capsys.readouterr()
    first, second = map(json.loads, said.out.splitlines())
    assert first["verdict"] == "FITS" and second["row_id"] == 8 and set(second.values()) == {8, None}
    assert "no prediction: " in said.err and "rows.jsonl:2: `H1000` is not a device" in said.err


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        list(read_rows(tmp_path / "none.jsonl"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layers", 10**9), ("pp", 10**6), ("tp", 0), ("dp", -8), ("micro_batch", "many"), ("seq_len", 0.5),
        ("vp", True), ("num_gpus", float("nan")), ("zero_stage", 4), ("params", -7e9), ("hidden", [1024]),
    ],
)  # fmt: skip
def test_numbers_that_cannot_be_meant(key: str, value: object) -> None:
    row = {"row_id": 1, "gpu": "A100", "layers": 24, "hidden": 1024, "heads": 16, "num_gpus": 8, key: value}
    with pytest.raises(UserError, match=f"`{key}` is "):
        predict(row)


def test_numbers_as_text_are_numbers() -> None:
    row = {"row_id": 1, "gpu": "A100", "layers": "24", "hidden": "1024", "heads": 16, "num_gpus": "8"}
    assert predict(row) == predict({**row, "layers": 24, "hidden": 1024, "num_gpus": 8})


GROUPED = [
    {"row_id": 1, "group": "a", "gpu": "A100-80GB", "num_gpus": 8, "dp": 1, "tp": 8, "micro_batch": 1},
    {"row_id": 2, "group": "a", "gpu": "A100-80GB", "num_gpus": 8, "dp": 8, "tp": 1, "micro_batch": 8},
    {"row_id": 3, "group": "b", "gpu": "A100-80GB", "num_gpus": 8, "dp": 8, "micro_batch": 8},
]
MODEL = {"layers": 24, "hidden": 2048, "heads": 16, "seq_len": 2048, "vocab": 51200}


def test_rows_are_ranked_by_predicted_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The order is that of the speeds that are predicted; all lines go to a file as well."""
    table, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    table.write_text("".join(json.dumps({**MODEL, "global_batch": 64, **row}) + "\n" for row in GROUPED))
    assert main([str(table), "--out", str(out)]) == 0
    speeds = {row["row_id"]: row["tokens_per_s_per_gpu"] for row in map(json.loads, out.read_text().splitlines())}
    assert main(["--rank", str(table)]) == 0
    printed = capsys.readouterr().out
    groups = {line["group"]: line["row_ids"] for line in map(json.loads, printed.splitlines())}
    assert groups == {"a": sorted((1, 2), key=lambda row: -speeds[row]), "b": [3]}
    assert main(["--rank", str(table), "--out", str(out)]) == 0
    assert out.read_text() == printed
