"""Axolotl's files: adapters, sequences, data sets by prompt type, its layouts."""

from __future__ import annotations

import pytest
from foreign import AXOLOTL, ZERO3, checked, lost, why, written

from stoker.errors import UserError
from stoker.job.importers import import_files


def test_axolotl_s_values_and_defaults() -> None:
    imported = import_files([written(AXOLOTL)])
    job = checked(imported).job
    assert (job.task, job.tune.method, job.tune.dropout) == ("sft", "qlora", 0.05)
    assert [(s.path, s.format, s.template, s.too_long) for s in job.data] == [
        ("org/cleaned", "instruction", "plain", "drop"),
        ("talk.jsonl", "sharegpt", "chatml", "drop"),
    ]
    assert (job.train.lr, job.train.warmup, job.train.pack, job.train.optimizer) == (2e-4, 10, True, "adamw")
    assert (job.evaluate.fraction, job.evaluate.rows, job.checkpoint.keep) == (0.1, "all", 4)
    assert "8 bits" in imported.text
    assert lost(imported) == set()


def test_axolotl_completions_are_pretraining_and_other_types_keep_their_columns() -> None:
    sets = "datasets:\n  - {path: org/books, type: completion, field: body}\n"
    job = checked(import_files([written("base_model: org/m\nmicro_batch_size: 1\n" + sets)])).job
    assert (job.task, job.data[0].format, job.data[0].columns) == ("pretrain", "text", {"text": "body"})
    assert (job.train.seq_len, job.tune.method, job.epochs, job.train.warmup) == (512, "full", 1.0, 0.03)
    kind = "{field_instruction: q, field_output: a, format: '[INST] {instruction}'}"
    own = f"datasets:\n  - path: x.jsonl\n    type: {kind}\n"
    imported = import_files([written("base_model: org/m\nsequence_len: 64\n" + own)])
    assert checked(imported).job.data[0].columns == {"instruction": "q", "output": "a"}
    assert lost(imported) == {"datasets[0].type.format"}


def test_what_stoker_refuses_beside_the_rest_is_left_out_with_its_reason() -> None:
    zero = {**ZERO3["zero_optimization"], "offload_param": {"device": "cpu"}}  # type: ignore[dict-item]
    written({**ZERO3, "zero_optimization": zero}, "z3.json")
    imported = import_files([written(AXOLOTL, deepspeed="z3.json")], processes=4)
    parallel = checked(imported).job.parallel
    assert (parallel.shard, parallel.offload) == ("zero3", "none")
    assert "Stoker refuses it: `offload: params` moves" in why(imported, "zero_optimization.offload_param.device")


def test_axolotl_s_fsdp_and_axes() -> None:
    fsdp = "fsdp_version: 2\nfsdp_config: {offload_params: true, reshard_after_forward: true, version: 2}\n"
    text = AXOLOTL + fsdp + "dp_shard_size: 2\ndp_replicate_size: 2\ntensor_parallel_size: 2\n"
    job = checked(import_files([written(text, adapter="", load_in_4bit="")])).job
    assert (job.parallel.data, job.parallel.shard_size, job.parallel.tensor) == (4, 2, 2)
    assert (job.parallel.shard, job.parallel.offload) == ("zero3", "params")
    old = (
        "fsdp: [full_shard, auto_wrap]\nfsdp_config: {fsdp_offload_params: true, fsdp_sharding_strategy: FULL_SHARD}\n"
    )
    job = checked(import_files([written(AXOLOTL + old, adapter="", load_in_4bit="")], processes=2)).job
    assert (job.parallel.shard, job.parallel.offload, job.parallel.data) == ("zero3", "params", 2)


@pytest.mark.parametrize("line", ["rl: dpo", "rl: grpo", "reward_model: true"])
def test_axolotl_s_other_tasks(line: str) -> None:
    with pytest.raises(UserError, match=r"Stoker cannot train `(dpo|grpo|reward)` yet"):
        import_files([written(AXOLOTL + line + "\n")])


def test_axolotl_s_layers_lora_plus_and_modules_trained_whole() -> None:
    more = (
        "loraplus_lr_ratio: 8\nlora_modules_to_save: [embed_tokens, lm_head]\n"
        "peft_layers_to_transform: [0, 2, 3, 1, 20]\n"
        "peft_layers_pattern: layers\nlora_target_modules: [q_proj]\nlora_target_parameters: [experts.down_proj]\n"
    )
    imported = import_files([written(AXOLOTL + more, lora_target_linear="")])
    tune = checked(imported).job.tune
    assert (tune.loraplus_ratio, tune.layers) == (8.0, "0-3,20")
    assert tune.modules_to_save == ["embed_tokens", "lm_head"] and tune.targets == ["q_proj", "experts.down_proj"]
    assert lost(imported) == set()
    one = import_files([written(AXOLOTL + "peft_layers_to_transform: 5\n")])
    assert (checked(one).job.tune.layers, checked(one).job.tune.targets) == ("5", "all-linear")
    with pytest.raises(UserError, match="must be numbers of blocks"):
        import_files([written(AXOLOTL + "peft_layers_to_transform: [first]\n")])


def test_a_regular_expression_is_no_pattern() -> None:
    imported = import_files([written(AXOLOTL + "lora_target_modules: .*self_attn.(q|v)_proj\n", lora_target_linear="")])
    assert checked(imported).job.tune.targets == "all-linear"
    assert lost(imported) == {"lora_target_modules"} and "*.self_attn.*" in why(imported, "lora_target_modules")
