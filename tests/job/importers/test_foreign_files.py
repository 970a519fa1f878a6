"""All tools' files: every key is accounted for, every job is accepted, files are merged."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from foreign import ACCELERATE, AXOLOTL, DEEPSPEED, LLAMA_FACTORY, TORCHTUNE, TRL, ZERO3, checked, lost, why, written

from stoker.errors import UserError
from stoker.job.document.yaml_document import parse_document
from stoker.job.importers import import_files
from stoker.job.importers.recognise import FORMATS


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("llama-factory", LLAMA_FACTORY), ("axolotl", AXOLOTL), ("trl", TRL), ("torchtune", TORCHTUNE),
        ("deepspeed", DEEPSPEED), ("deepspeed", ZERO3), ("accelerate", ACCELERATE),
    ],
)  # fmt: skip
def test_every_key_ends_in_one_list_and_the_job_is_accepted(format: str, text: Any) -> None:
    imported = import_files([written(text)])
    assert imported.tools == (FORMATS[format],)
    checked(imported)
    assert imported.unknown == ()
    keys = {item.key for item in imported.carried} | {item.key for item in imported.dropped}
    document = parse_document(Path("given.yaml").read_text().replace("\t", "  "), "given.yaml").data
    for key, value in document.items():
        blocks = isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], dict))
        assert any(k == key or (blocks and k.startswith((f"{key}.", f"{key}["))) for k in keys), key


def test_files_are_merged_the_trainer_s_words_win() -> None:
    trl = written(TRL, "sft.yaml")
    job = checked(import_files([trl, written(ACCELERATE, "fsdp.yaml")])).job
    assert (job.parallel.data, job.parallel.shard, job.train.batch) == (8, "zero3", 128)
    imported = import_files([trl, written(ACCELERATE, "fsdp.yaml", mixed_precision="fp16")])
    assert checked(imported).job.train.precision == "fp16"  # TRL's bf16 is its default, and was not written
    explicit = import_files([written(TRL + "bf16: true\n", "sft.yaml"), "fsdp.yaml"])
    assert checked(explicit).job.train.precision == "bf16"
    assert "bf16 of TRL wins" in why(explicit, "mixed_precision")
    with pytest.raises(UserError, match="both say what is trained"):
        import_files([trl, written(AXOLOTL, "ax.yaml")])


@pytest.mark.parametrize("text", [LLAMA_FACTORY, AXOLOTL, TRL])
def test_whose_code_runs_is_not_for_the_file_s_author_to_say(text: str) -> None:
    given = written(text + "trust_remote_code: true\n")
    for overrides, trusted in ([], False), (["model.trust_remote_code=true"], True):
        imported = import_files([given], overrides=overrides)
        model = checked(imported).job.model
        assert "trust_remote_code" in lost(imported) and model is not None and model.trust_remote_code == trusted


@pytest.mark.parametrize("format", ["llama-factory", "trl"])
def test_every_argument_of_transformers_trainer_is_known(format: str) -> None:
    from transformers import TrainingArguments

    given = written("".join(f"{field.name}:\n" for field in fields(TrainingArguments)))
    assert import_files([given], format=format).unknown == ()


def test_what_is_not_recognised() -> None:
    with pytest.raises(UserError, match="fit LLaMA-Factory or TRL alike; write `--from llama-factory` or"):
        import_files([written("model_name_or_path: m\nlearning_rate: 1e-4\n")])
    with pytest.raises(UserError, match="the nearest is Axolotl"):
        import_files([written("base_modle: m\nsequence_lenn: 12\n")])
    with pytest.raises(UserError, match="this is a job of Stoker already"):
        import_files([written("task: sft\nmodel: m\ndata: d\n")])
    with pytest.raises(UserError, match="there is no importer `axolottl`; write axolotl"):
        import_files([written(AXOLOTL)], format="axolottl")
    assert import_files([written("model_name_or_path: org/m\nlearning_rate: 1e-4\n")], format="trl").tools == ("TRL",)


@pytest.mark.parametrize("text", ["", "- a\n", "a: [1\n", '{"a": 1,, }'])
def test_files_that_are_none_are_told_with_their_place(text: str) -> None:
    with pytest.raises(UserError) as refused:
        import_files([written(text)])
    assert all(problem.file == "given.yaml" for problem in refused.value.problems)


@pytest.mark.parametrize("number", [".inf", "-.inf", ".nan", "'1e999'"])
@pytest.mark.parametrize(
    ("format", "text", "key"),
    [("axolotl", AXOLOTL, "eval_steps"), ("trl", TRL, "warmup_steps"), ("torchtune", TORCHTUNE, "epochs")],
)
def test_numbers_are_finite(format: str, text: str, key: str, number: str) -> None:
    with pytest.raises(UserError, match=rf"given.yaml:\d+:\d+: `{key}` must be a number"):
        import_files([written(text, **{key: number})], format=format)
