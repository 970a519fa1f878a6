"""Paths of keys and what the schema says of them; the nearest key; the schema for editors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from stoker.errors import UserError
from stoker.job.blocks.source_block import SourceBlock
from stoker.job.blocks.train_block import TrainBlock
from stoker.job.document.yaml_document import parse_value
from stoker.job.keys.annotations import block_of, describe
from stoker.job.keys.editor_schema import editor_schema
from stoker.job.keys.key_paths import (
    KeyPath,
    block_at,
    dotted,
    example_of,
    field_at,
    parse_key,
    schema_paths,
    target_paths,
)
from stoker.job.keys.suggest_key import ALIASES, IN_BLOCK, nearest, suggest_key
from stoker.job.keys.tune_keys import KEYS
from stoker.job.resolution.default_reasons import REASONS, UNDECIDED
from stoker.job.schema import Job

WORD = st.from_regex(r"[a-z_][a-z0-9_]*", fullmatch=True)


@given(WORD, st.lists(WORD | st.integers(0, 999_999), max_size=4))
def test_a_path_written_out_is_read_back(first: str, rest: list[str | int]) -> None:
    path = (first, *rest)
    assert parse_key(dotted(path)) == path


@pytest.mark.parametrize("text", ["", ".", "a.", ".a", "[0]", "a[", "a[x]", "a[0]b", "a..b"])
def test_what_is_no_path_is_refused(text: str) -> None:
    with pytest.raises(UserError):
        parse_key(text)


@pytest.mark.parametrize(
    ("path", "block"),
    [
        ((), Job),
        (("train",), TrainBlock),
        (("data", 0), SourceBlock),
        (("evaluate", "data", 3), SourceBlock),
        (("data",), None),
        (("train", "lr"), None),
        (("nothing",), None),
    ],
)
def test_blocks_are_found_at_their_paths(path: KeyPath, block: type | None) -> None:
    assert block_at(path) is block


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("train.batch", "a whole number above 0 or auto"),
        ("train.lr", "a number above 0 and below 10 or auto"),
        ("data[0].max_dropped", "a number from 0 to 1"),
        ("train.pack", "true or false or auto"),
        ("tune.targets", "all-linear or a list of words"),
        ("tune.method", "one of full, lora, qlora, prefix, prompt, p-tuning"),
        ("parallel.stages", "a list of whole numbers above 0 or auto"),
        ("parallel.shard", "one of none, zero1, zero2, zero3"),
    ],
)
def test_types_in_words(key: str, words: str) -> None:
    field, found = field_at(parse_key(key))
    assert field is not None and found == parse_key(key)
    assert describe(field) == words


def test_other_tools_names_lead_to_keys_that_exist() -> None:
    known = {dotted(path) for path in (*schema_paths(), *target_paths())} | {"evaluate.data"}
    assert set(ALIASES.values()) | set(IN_BLOCK.values()) <= known
    assert not set(ALIASES) & {dotted(path) for path in schema_paths() if len(path) == 1}


def test_every_default_has_a_reason_for_a_key_that_exists() -> None:
    assert set(REASONS) | set(UNDECIDED) <= {dotted(path) for path in schema_paths()}


def first_of_lists(path: KeyPath) -> KeyPath:
    """The path with the index 0 behind every list of blocks that it enters."""
    indexed: KeyPath = ()
    for part in path:
        field, _ = field_at(indexed) if indexed else (None, ())
        in_list = field is not None and block_of(field.annotation)[1]
        indexed = (*indexed, 0, part) if in_list else (*indexed, part)
    return indexed


def test_examples_are_values_that_the_schema_takes() -> None:
    for path in (*schema_paths(), *target_paths()):
        indexed = first_of_lists(path)
        field, found = field_at(indexed)
        assert field is not None and found == indexed
        if block_of(field.annotation)[0] is None:
            TypeAdapter(field.annotation).validate_python(parse_value(example_of(indexed)), strict=True)


@pytest.mark.parametrize(
    ("parent", "key", "target", "certain"),
    [
        ((), "modle", ("model",), False),  # or module?
        ((), "epohcs", ("epochs",), True),
        (("train",), "lrr", ("train", "lr"), True),
        (("train",), "LR", ("train", "lr"), True),
        ((), "warm-up", ("train", "warmup"), False),
        ((), "save_total_limit", ("checkpoint", "keep"), True),
        (("data", 0), "file", ("data", 0, "path"), True),
        (("tune",), "r", ("tune", "rank"), True),
        ((), "template", ("data", "template"), False),
        (("train",), "beta", ("dpo", "beta"), True),
        (("parallel",), "tensor_model_parallel_size", ("parallel", "tensor"), True),
        ((), "cp_size", ("parallel", "context"), True),
        (("train",), "shard", ("parallel", "shard"), True),
        ((), "fsdp", None, False),
        ((), "name", ("output",), True),
        (("evaluate",), "max_rows", ("evaluate", "rows"), True),
        (("evaluate",), "max_samples", ("evaluate", "rows"), True),
    ],
)
def test_suggestions(parent: KeyPath, key: str, target: KeyPath | None, certain: bool) -> None:
    found = suggest_key(parent, key)
    assert found.certain is certain
    assert target is None or found.target == target


@pytest.mark.parametrize("key", ["log", "logging", "logging_steps", "report_to", "use_wandb", "use_mlflow"])
@pytest.mark.parametrize("parent", [(), ("train",)])
def test_loggers_of_other_trainers(parent: KeyPath, key: str) -> None:
    assert "write `tensorboard: true`, `wandb: PROJECT` or" in suggest_key(parent, key).text


def test_a_kind_of_feature_is_no_logger() -> None:
    assert suggest_key(("ranking",), "log").text == "`log` belongs under `ranking.features:`"


@pytest.mark.parametrize(
    ("word", "options", "best"),
    [
        ("3bit", ["none", "8bit", "4bit"], "4bit"),
        ("7bit", ["none", "8bit", "4bit"], "8bit"),
        ("cosin", ["linear", "cosine"], "cosine"),
        ("bfloat16", ["auto", "bf16", "fp16"], "bf16"),
        ("3", ["none", "zero1", "zero2", "zero3"], "zero3"),
        ("FULL_SHARD", ["none", "zero1", "zero2", "zero3"], "zero3"),
        ("1F1B", ["gpipe", "1f1b", "interleaved"], "1f1b"),
        ("qqq", ["linear", "cosine"], None),
    ],
)
def test_the_nearest_value(word: str, options: list[str], best: str | None) -> None:
    assert nearest(word, options) == best


def test_the_editors_schema_takes_shorthands() -> None:
    schema = editor_schema()
    assert schema["anyOf"] == [{"required": ["task"]}, {"required": ["stages"]}]
    model = schema["properties"]["model"]["anyOf"]
    assert {"type": "string", "minLength": 1} in model and {"$ref": "#/$defs/ModelBlock"} in model
    tune = schema["properties"]["tune"]["anyOf"]
    assert {"type": "string", "enum": list(KEYS)} in tune and {"$ref": "#/$defs/TuneBlock"} in tune
    for data in (schema["properties"]["data"], schema["$defs"]["EvaluateBlock"]["properties"]["data"]):
        kinds = [option.get("type", option.get("$ref")) for option in data["anyOf"]]
        assert kinds == ["string", "#/$defs/SourceBlock", "array"]
        assert {"type": "string", "minLength": 1} in data["anyOf"][2]["items"]["anyOf"]
    assert {"type": "string", "const": "auto"} in schema["properties"]["parallel"]["anyOf"]
    described = [p for block in schema["$defs"].values() for p in block["properties"].values()]
    assert all(p.get("description") for p in [*schema["properties"].values(), *described])
