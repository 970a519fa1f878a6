"""Axolotl's files: adapters, sequences, data sets by prompt type, its layouts."""

from __future__ import annotations

import pytest
from foreign import AXOLOTL, ZERO3, checked, lost, why, written

from stoker.errors import UserError
from stoker.job.blocks.model_block import SpecialTokensBlock
from stoker.job.blocks.source_block import TemplateBlock
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
    source = checked(imported).job.data[0]
    assert source.columns == {"instruction": "q", "output": "a"} and lost(imported) == set()
    assert source.template == TemplateBlock(user="[INST] {content}")


def test_what_stoker_refuses_beside_the_rest_is_left_out_with_its_reason() -> None:
    zero = {**ZERO3["zero_optimization"], "offload_param": {"device": "cpu"}}  # type: ignore[dict-item]
    written({**ZERO3, "zero_optimization": zero}, "z3.json")
    imported = import_files([written(AXOLOTL, deepspeed="z3.json")], processes=4)
    parallel = checked(imported).job.parallel
    assert (parallel.shard, parallel.offload) == ("zero3", "none")
    assert "Stoker refuses it: `offload: params` copies" in why(imported, "zero_optimization.offload_param.device")


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


@pytest.mark.parametrize("line", ["rl: dpo", "reward_model: true"])
def test_axolotl_s_other_tasks(line: str) -> None:
    with pytest.raises(UserError, match=r"keys of Axolotl's `(dpo|reward)` are not carried"):
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


BASE = "base_model: org/m\nmicro_batch_size: 1\nsequence_len: 64\nchat_template: chatml\n"


def test_axolotl_s_changes_of_the_configuration_are_carried() -> None:
    imported = import_files(
        [written(AXOLOTL + "overrides_of_model_config: {rope_scaling: {type: yarn, factor: 4.0}}\n")]
    )
    job = checked(imported).job
    assert job.model is not None and job.model.config == {"rope_scaling": {"type": "yarn", "factor": 4.0}}


def test_axolotl_s_tokens_are_carried() -> None:
    tokens = (
        "special_tokens: {eos_token: <|im_end|>, bos_token: <s>, pad_token: <pad>, additional_special_tokens: [<x>]}\n"
        "tokens: [<a>, <b>]\neot_tokens: [<|im_end|>, <|eot|>]\n"
    )
    imported = import_files([written(AXOLOTL.split("special_tokens:", maxsplit=1)[0] + tokens)])
    job = checked(imported).job
    assert job.model is not None and job.model.stop == ["<|im_end|>", "<|eot|>"]
    assert job.model.special_tokens == SpecialTokensBlock(bos="<s>", additional=["<a>", "<b>", "<x>"])
    assert {source.special_tokens for source in job.data} == {"keep"}
    assert lost(imported) == set() and "padding never counts" in why(imported, "special_tokens.pad_token")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("train_on_inputs: true", "everything"),
        ("train_on_inputs: false", "all"),
        ("datasets: [{path: a, type: chat_template, roles_to_train: [user, assistant]}]", "everything"),
        ("datasets: [{path: a, type: chat_template, roles_to_train: [assistant]}]", "all"),
        (
            "datasets: [{path: a, type: chat_template, roles_to_train: [assistant]}]\ntrain_on_inputs: true",
            "everything",
        ),
    ],
)
def test_what_axolotl_trains_on(lines: str, expected: str) -> None:
    data = "" if "datasets" in lines else "datasets: [{path: a, type: alpaca}]\n"
    imported = import_files([written(f"{BASE}{data}{lines}\n")])
    assert {source.train_on for source in checked(imported).job.data} == {expected}
    assert lost(imported) == set() and not imported.unknown


def test_axolotl_s_conversations_are_templates() -> None:
    def source(more: str):  # type: ignore[no-untyped-def]
        imported = import_files([written(BASE + f"datasets: [{{path: a, type: sharegpt, {more}}}]\n")])
        return checked(imported).job.data[0], lost(imported)

    assert source("conversation: chatml")[0].template == "chatml"
    found, missing = source("conversation: vicuna_v1.1")
    assert missing == {"datasets[0].conversation"} and found.template == "chatml"  # the file's own chat_template
    assert source("roles: {user: [human], assistant: [gpt]}")[1] == set()
    assert source("roles: {user: [kunde]}")[1] == {"datasets[0].roles"}
    assert source("train_on_eos: none")[1] == {"datasets[0].train_on_eos"}
    kind = "path: a, type: {format: '{instruction} / {input} =>', no_input_format: '{instruction} =>'}"
    imported = import_files([written(BASE + f"datasets: [{{{kind}}}]\n")])
    assert checked(imported).job.data[0].template == TemplateBlock(user="{content} =>")
    assert lost(imported) == {"datasets[0].type.format"}


@pytest.mark.parametrize("line", ["activation_offloading: true\n", "activation_offloading: legacy\n"])
def test_offloaded_activations(line: str) -> None:
    imported = import_files([written(AXOLOTL + line)])
    assert checked(imported).job.parallel.offload == "activations"
    assert "activation_offloading" in lost(import_files([written(AXOLOTL + "activation_offloading: disk\n")]))


def test_arguments_of_recomputation_are_known() -> None:
    imported = import_files([written(AXOLOTL + "gradient_checkpointing_kwargs: {use_reentrant: false}\n")])
    assert not imported.unknown
    assert "no variants" in why(imported, "gradient_checkpointing_kwargs.use_reentrant")


def test_quantised_training_is_lost_and_not_unknown() -> None:
    imported = import_files([written(AXOLOTL + "qat: {weight_dtype: int8}\n")])
    assert imported.unknown == () and "qat.weight_dtype" in lost(imported)


def test_an_axis_of_no_process_is_refused_at_its_place() -> None:
    given = written(AXOLOTL + "tensor_parallel_size: 0\n")
    with pytest.raises(UserError, match=r"given.yaml:\d+:\d+: .*must be a whole number above 0, not 0"):
        import_files([given], processes=2)


def test_axolotl_s_groups_of_answers() -> None:
    text = "base_model: org/m\nrl: grpo\nmicro_batch_size: 8\ngradient_accumulation_steps: 2\nmax_steps: 20\n"
    text += "trl:\n  num_generations: 4\n  max_completion_length: 64\n  beta: 0.02\n  use_vllm: true\n"
    text += "  reward_funcs: [rewards.right, rewards.short]\n  reward_weights: [1.0, 0.5]\n  temperature: 0.8\n"
    text += "datasets:\n  - path: asked.jsonl\n    type: chat_template\n"
    imported = import_files([written(text)], processes=1)
    job = checked(imported).job
    block = job.grpo  # type: ignore[attr-defined]
    assert (job.task, block.answers, block.prompts, block.max_tokens, job.train.batch) == ("grpo", 4, 4, 64, 16)
    assert (block.kl, block.temperature, block.loss) == (0.02, 0.8, "dapo")
    assert list(block.rewards.items()) == [
        ("python:rewards:right", 1.0),
        ("python:rewards:short", 0.5),
    ]
    assert lost(imported) == set()


def test_a_batch_is_that_of_a_process_and_constant_has_no_warm_up() -> None:
    changes = {"gradient_accumulation_steps": "", "lr_scheduler": "constant", "warmup_steps": 100}
    text = AXOLOTL + "batch_size: 32\n"
    imported = import_files([written(text, micro_batch_size=4, **changes)], processes=8)
    train = checked(imported).job.train
    assert (train.batch, train.micro_batch, train.accumulation, train.warmup) == (256, 4, 8, 0)
    assert "has no warm-up" in why(imported, "warmup_steps")
    with pytest.raises(UserError, match="`batch_size` must be a multiple of `micro_batch_size`, which is 3"):
        import_files([written(text, micro_batch_size=3, **changes)])


def test_axolotl_s_shards_are_lost_as_all_rows_are_read() -> None:
    sets = "datasets:\n  - {path: org/d, type: alpaca, shards: 10}\ndataset_shard_num: 10\ndataset_shard_idx: 0\n"
    imported = import_files([written("base_model: org/m\nmicro_batch_size: 1\n" + sets)])
    assert lost(imported) == {"datasets[0].shards", "dataset_shard_num"}
