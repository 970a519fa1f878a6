"""Recipes: a written recipe has every key of the schema, and is a valid job."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stoker.errors import UserError
from stoker.job import load_job
from stoker.job.document.yaml_document import parse_document
from stoker.job.keys.annotations import block_of, describe
from stoker.job.keys.key_paths import KeyPath, field_at, schema_paths
from stoker.job.keys.tune_keys import KEYS
from stoker.job.recipes import recipe_description, recipe_names, write_recipe
from stoker.job.stages import has_stages, read_stages

SWITCHED_OFF = re.compile(r"^#((?:  )*(?:- )?[a-z_0-9]+:)", re.MULTILINE)


def test_the_default_comes_first_and_all_are_there() -> None:
    assert recipe_names() == [
        "sft-lora", "classify-prompt", "continue-vocabulary", "dpo", "grpo-arithmetic", "module-digits", "pretrain-10m",
        "ranking-movielens", "reward", "rlhf", "sft-full", "sft-qlora",
    ]  # fmt: skip


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_is_a_good_job_and_sets_what_it_says(tmp_path: Path, name: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(write_recipe(name))
    if has_stages(path):
        assert [stage.load().job.task for stage in read_stages(path).stages] == ["sft", "reward", "ppo"]
        return
    loaded = load_job(path)
    assert loaded.origins["version"].source == "file"
    set_here = {key for key, origin in loaded.origins.items() if origin.source == "file"}
    assert set_here <= {
        "version", "task", "model.name", "data[0].path", "tune.method", "steps", "epochs", "train.lr",
        "train.batch", "module.model", "data[0].format", "data[0].columns", "tune.tokens", "tune.text",
        "module.loss", "module.data", "module.evaluate", "evaluate.every", "model.tokenizer", "tune.new_rows_first",
        "data[0].split", "data[0].weight", "data[1].path", "data[1].weight", "train.seq_len", "evaluate.data[0].path",
        "evaluate.data[0].split", "checkpoint.every", "evaluate.fraction", "grpo.rewards", "grpo.loss", "grpo.prompts",
        "ranking.label", "ranking.positive", "ranking.model", "ranking.hidden", "ranking.table.lr", "train.schedule",
        "grpo.answers", "grpo.max_tokens", "grpo.kl",
        "grpo.temperature",
    }  # fmt: skip


def test_the_default_recipe_has_its_values(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(write_recipe())
    job = load_job(path).job
    assert job.model is not None
    found = (
        job.task,
        job.model.name,
        job.data[0].path,
        job.tune.method,
        job.steps,
        job.train.batch,
        job.train.lr,
    )
    assert found == ("sft", "smollm2-135m", "chatterbot-corpus", "lora", 60, 8, 5e-4)


@pytest.mark.parametrize("name", recipe_names())
def test_every_key_of_the_schema_is_written_with_its_type_and_meaning(name: str) -> None:
    text = write_recipe(name)
    whole = parse_document(SWITCHED_OFF.sub(r"\1", text), "job.yaml").data
    flat = " ".join(line.strip().removeprefix("#").strip() for line in text.splitlines())
    for path in schema_paths():
        indexed = _indexed(path)
        value = whole
        for part in indexed:
            value = value[part]
        field, _ = field_at(indexed)
        assert field is not None
        assert " ".join(str(field.description).split()) in flat, path
        if not isinstance(value, dict) and not block_of(field.annotation)[1]:
            assert f"{field.description} [{describe(field)}; " in flat, path


def _indexed(path: KeyPath) -> KeyPath:
    """A path through lists of blocks, with the number of each list's first block."""
    found: KeyPath = ()
    for part in path:
        found = (*found, part)
        field, _ = field_at(found)
        if field is not None and block_of(field.annotation)[1] and len(found) - found.count(0) < len(path):
            found = (*found, 0)
    return found


def test_each_switched_off_line_can_be_switched_on(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    text = SWITCHED_OFF.sub(r"\1", write_recipe("sft-lora"))
    # All but what excludes itself: steps and epochs, weights and temperature, the keys of other ways to tune, the block
    # of another task, and the store that follows one.
    others = "|".join(key for keys in KEYS.values() for key in keys if key not in KEYS["lora"])
    text = re.sub(rf"^(epochs|    weight|  ({others})):.*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^export:.*\n(( .*)?\n)*", "", text, flags=re.MULTILINE)
    path.write_text(text[: text.index("# the block of task: ")])
    assert load_job(path).job.checkpoint.to == "checkpoints"


@pytest.mark.slow
def test_lines_fit() -> None:
    assert max(len(line) for name in recipe_names() for line in write_recipe(name).splitlines()) <= 110


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"there is no recipe `sft-lorra`; write sft-lora"):
        write_recipe("sft-lorra")
    assert recipe_description("sft-lora").startswith("Fine-tunes a small chat model")
