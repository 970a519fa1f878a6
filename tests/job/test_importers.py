"""Importers: shapes that the tools ship, rewritten by hand; every key is accounted for, every job is accepted."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import UserError
from stoker.job.document import parse_document
from stoker.job.importers import Imported, import_files
from stoker.job.importers.recognise import FORMATS
from stoker.job.load import LoadedJob, check_document

LLAMA_FACTORY = """
model_name_or_path: org/base-4b
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: identity,demo
template: qwen3
cutoff_len: 2048
max_samples: 1000
preprocessing_num_workers: 16
output_dir: saves/sft
logging_steps: 10
save_steps: 500
overwrite_output_dir: true
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
resume_from_checkpoint: null
"""
REGISTER = {
    "identity": {"file_name": "identity.json"},
    "demo": {"file_name": "demo.json", "columns": {"prompt": "frage", "query": "input", "response": "antwort"}},
    "tools": {"file_name": "tools.json", "formatting": "sharegpt", "columns": {"messages": "talk", "tools": "tools"}},
    "chat": {
        "file_name": "chat.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "corpus": {"file_name": "corpus.jsonl", "columns": {"prompt": "text"}},
    "wiki": {"hf_hub_url": "org/wiki", "subset": "en", "columns": {"prompt": "content"}},
}
ZERO3 = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "fp16": {"enabled": "auto", "loss_scale": 0, "hysteresis": 2},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": False,
        "reduce_bucket_size": "auto",
        "sub_group_size": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
DEEPSPEED = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_print": 2000,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.95], "eps": 1e-7, "weight_decay": 3e-7}},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"warmup_num_steps": 100, "total_num_steps": 5000, "warmup_type": "linear", "cos_min_ratio": 0.1},
    },
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "cpu", "pin_memory": True},
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "contiguous_gradients": True,
    },
    "wall_clock_breakdown": False,
}
AXOLOTL = """
base_model: org/llama-1b
model_type: LlamaForCausalLM
load_in_8bit: false
load_in_4bit: true
strict: false
datasets:
  - path: org/cleaned
    type: alpaca
  - path: talk.jsonl
    ds_type: json
    type: chat_template
    field_messages: conversations
    message_property_mappings: {role: from, content: value}
    roles_to_train: [assistant]
chat_template: chatml
dataset_prepared_path: prepared
val_set_size: 0.1
output_dir: ./outputs/lora-out
adapter: qlora
lora_model_dir:
sequence_len: 2048
sample_packing: true
pad_to_sequence_len: true
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_linear: true
wandb_project:
gradient_accumulation_steps: 2
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 2e-4
train_on_inputs: false
bf16: auto
fp16:
tf32: false
gradient_checkpointing: true
flash_attention: true
warmup_steps: 10
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
special_tokens:
  pad_token: "<pad>"
"""
TRL = """
model_name_or_path: org/base-0.5b
dataset_name: org/capybara
learning_rate: 2.0e-4
num_train_epochs: 1
packing: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
eval_strategy: steps
eval_steps: 100
use_peft: true
lora_r: 32
lora_alpha: 16
assistant_only_loss: true
output_dir: out
push_to_hub: true
"""
ACCELERATE = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_version: 2
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
TORCHTUNE = """
output_dir: out/lora
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: [q_proj, v_proj, output_proj]
  apply_lora_to_mlp: True
  apply_lora_to_output: False
  lora_rank: 8
  lora_alpha: 16
  lora_dropout: 0.0
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: models/llama/original/tokenizer.model
  max_seq_len: 4096
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: org/llama-8b
  checkpoint_files: [a.safetensors, b.safetensors]
  recipe_checkpoint: null
  output_dir: ${output_dir}
  model_type: LLAMA3
resume_from_checkpoint: False
save_adapter_weights_only: False
dataset:
  _component_: torchtune.datasets.alpaca_cleaned_dataset
  packed: False
seed: null
shuffle: True
batch_size: 2
optimizer:
  _component_: torch.optim.AdamW
  fused: True
  weight_decay: 0.01
  lr: 3e-4
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 100
loss:
  _component_: torchtune.modules.loss.LinearCrossEntropyLoss
epochs: 1
max_steps_per_epoch: null
gradient_accumulation_steps: 8
clip_grad_norm: null
compile: False
metric_logger:
  _component_: torchtune.training.metric_logging.DiskLogger
  log_dir: ${output_dir}/logs
log_every_n_steps: 1
device: cuda
dtype: bf16
enable_activation_checkpointing: True
enable_activation_offloading: False
profiler:
  _component_: torchtune.training.setup_torch_profiler
  enabled: False
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/dataset_info.json").write_text(json.dumps(REGISTER))
    return tmp_path


def written(text: str | dict[str, Any], name: str = "given.yaml", **changes: str) -> str:
    """A file of these keys, with lines replaced: ``learning_rate="fast"``; an empty one takes the line out."""
    if isinstance(text, dict):
        text = json.dumps(text, indent="\t")
    for key, value in changes.items():
        kept = [line for line in text.splitlines() if not line.startswith(f"{key}:")]
        text = "\n".join(kept + [f"{key}: {value}"] * bool(value)) + "\n"
    Path(name).write_text(text)
    return name


def checked(imported: Imported) -> LoadedJob:
    """The job, read back from its text by the door that every job takes."""
    document = parse_document(imported.text, "job.yaml")
    assert {key: value for key, value in document.data.items() if value} == imported.job
    return check_document(document)


def why(imported: Imported, key: str) -> str:
    return next(item.why for item in imported.dropped if item.key == key)


def lost(imported: Imported) -> set[str]:
    return {item.key for item in imported.dropped if item.matters}


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


def test_llama_factory_s_values_and_defaults() -> None:
    imported = import_files([written(LLAMA_FACTORY)])
    job = checked(imported).job
    assert job.model is not None
    assert (job.task, job.model.name, job.model.trust_remote_code) == ("sft", "org/base-4b", True)
    assert (job.tune.method, job.tune.rank, job.tune.alpha, job.tune.targets) == ("lora", 8, 16, "all-linear")
    assert (job.train.lr, job.train.micro_batch, job.train.accumulation, job.train.batch) == (1e-4, 1, 8, 8)
    assert (job.train.schedule, job.train.warmup, job.train.weight_decay) == ("cosine", 0.1, 0.0)
    assert (job.epochs, job.seed, job.evaluate.fraction, job.parallel.recompute) == (3.0, 42, 0.0, "full")
    assert [source.path for source in job.data] == ["data/identity.json", "data/demo.json"]
    assert job.data[1].columns == {"instruction": "frage", "output": "antwort"}
    assert job.data[0].split == "[:1000]"
    assert "# LLaMA-Factory's default; twice the rank" in imported.text
    assert "the tokenizer's own takes the place of `qwen3`" in imported.text


@pytest.mark.parametrize(
    ("name", "format", "columns"),
    [
        ("tools", "sharegpt", {"conversations": "talk"}), ("chat", "messages", {}), ("identity", "instruction", {}),
    ],
)  # fmt: skip
def test_the_register_tells_the_format(name: str, format: str, columns: dict[str, str]) -> None:
    source = checked(import_files([written(LLAMA_FACTORY, dataset=name)])).job.data[0]
    assert (source.format, source.columns) == (format, columns)


def test_pre_training_reads_one_column_as_text_and_packs() -> None:
    imported = import_files([written(LLAMA_FACTORY, stage="pt", dataset="corpus,wiki")])
    job = checked(imported).job
    assert (job.task, job.train.pack) == ("pretrain", True)
    assert [(s.path, s.format, s.columns) for s in job.data] == [
        ("data/corpus.jsonl", "text", {}),
        ("org/wiki", "text", {"text": "content"}),
    ]
    assert lost(imported) == {"wiki.subset"}
    assert why(imported, "template") == "no effect beside the other keys"


def test_quantised_bases() -> None:
    four = import_files([written(LLAMA_FACTORY, quantization_bit="4")])
    assert checked(four).job.tune.method == "qlora"
    eight = checked(import_files([written(LLAMA_FACTORY, quantization_bit="8")])).job
    assert eight.model is not None
    assert (eight.tune.method, eight.model.quantise) == ("lora", "8bit")
    with pytest.raises(UserError, match="to 4 or 8 bits, not 2"):
        import_files([written(LLAMA_FACTORY, quantization_bit="2")])


def test_a_deepspeed_file_that_is_named_is_read_with_it() -> None:
    Path("ds").mkdir()
    written(ZERO3, "ds/z3.json")
    given = written(LLAMA_FACTORY, deepspeed="ds/z3.json")
    job = checked(import_files([given], processes=8)).job
    assert (job.parallel.shard, job.parallel.data, job.train.batch) == ("zero3", 8, 64)
    unsaid = import_files([given])
    assert checked(unsaid).job.parallel.shard == "none"
    assert "  # shard: zero3  # over how many processes is not said" in unsaid.text
    assert lost(unsaid) == {"zero_optimization.stage"}
    assert checked(import_files([written(LLAMA_FACTORY, deepspeed="{}")])).job.parallel.shard == "none"
    missing = import_files([written(LLAMA_FACTORY, deepspeed="no.json")])
    assert "there is no such file" in why(missing, "deepspeed")


@pytest.mark.parametrize("stage", ["dpo", "kto", "ppo", "rm"])
def test_tasks_to_come_are_refused_at_their_place(stage: str) -> None:
    given = written(LLAMA_FACTORY, stage=stage)
    line = Path(given).read_text().splitlines().index(f"stage: {stage}") + 1
    with pytest.raises(UserError) as refused:
        import_files([given])
    (problem,) = refused.value.problems
    assert (problem.file, problem.line, problem.column) == (given, line, 8)
    assert problem.message == f"Stoker cannot train `{stage}` yet"
    assert "pretrain, sft" in problem.suggestion


def test_wrong_values_are_told_all_at_once_with_their_places() -> None:
    given = written(LLAMA_FACTORY, learning_rate="1e-4x", num_train_epochs="[1]", bf16="maybe", lora_rank="0")
    with pytest.raises(UserError) as refused:
        import_files([given])
    assert [problem.message for problem in refused.value.problems] == [
        "`learning_rate` must be a number, not '1e-4x'",
        "`num_train_epochs` must be a number, not a list",
        "`bf16` must be true or false, not 'maybe'",
    ]
    assert all(problem.file == given and problem.line and problem.column for problem in refused.value.problems)
    with pytest.raises(UserError, match=r"given.yaml:\d+:12: `lora_rank`: .* whole number above 0"):
        import_files([written(LLAMA_FACTORY, lora_rank="0")])
    with pytest.raises(UserError, match=r"`idendity` is not in data/dataset_info.json; did you mean identity"):
        import_files([written(LLAMA_FACTORY, dataset="idendity")])
    Path("data/dataset_info.json").unlink()
    with pytest.raises(UserError, match=r"dataset_info.json, which is not found; name it: `--data-info"):
        import_files([written(LLAMA_FACTORY)])


def test_unknown_keys_are_listed_with_the_nearest() -> None:
    (unknown,) = import_files([written(LLAMA_FACTORY, lerning_rate="1")]).unknown
    assert (unknown.key, unknown.near, unknown.where) == ("lerning_rate", "learning_rate", "given.yaml:27:15")


def test_numbers_that_yaml_1_1_reads_as_text_and_its_words_for_truth() -> None:
    job = checked(import_files([written(LLAMA_FACTORY, learning_rate='"5e-6"', bf16="yes")])).job
    assert (job.train.lr, job.train.precision) == (5e-6, "bf16")


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


def test_trl_s_values_and_defaults() -> None:
    imported = import_files([written(TRL)])
    job = checked(imported).job
    assert (job.task, job.tune.method, job.tune.rank, job.tune.alpha, job.tune.dropout) == ("sft", "lora", 32, 16, 0.05)
    assert (job.train.lr, job.train.schedule, job.train.warmup, job.train.seq_len) == (2e-4, "linear", 0, 1024)
    assert (job.train.precision, job.parallel.recompute, job.train.pack) == ("bf16", "full", True)
    assert (job.evaluate.data[0].path, job.evaluate.data[0].split, job.evaluate.every) == ("org/capybara", "test", 100)
    assert "write [q_proj, v_proj]" in " ".join(imported.text.split())
    assert lost(imported) == set()
    assert "assistant_only_loss" in lost(import_files([written(TRL, assistant_only_loss="")]))


def test_trl_s_mixtures() -> None:
    sets = "datasets:\n  - {path: json, data_files: mine.jsonl, fraction: 0.7}\n"
    sets += "  - {path: org/b, split: 'train[:10%]', fraction: 0.3}\n"
    job = checked(import_files([written(TRL + sets, dataset_name="", eval_strategy="", eval_steps="")])).job
    assert [(s.path, s.split, s.weight) for s in job.data] == [
        ("mine.jsonl", None, 0.7),
        ("org/b", "train[:10%]", 0.3),
    ]


def test_a_command_line() -> None:
    text = """# how it was run
trl sft --model_name_or_path org/m --dataset_name org/d \\
    --learning_rate 2.0e-5 --packing --use-peft true --lora_target_modules q_proj v_proj \\
    --output_dir="my runs"
"""
    imported = import_files([written(text, "run.sh")])
    job = checked(imported).job
    assert (job.task, job.train.lr, job.train.pack, job.output) == ("sft", 2e-5, True, "my runs")
    assert job.tune.targets == ["q_proj", "v_proj"]
    with pytest.raises(UserError, match=r"run.sh:1:1: Stoker cannot train `dpo` yet"):
        import_files([written("trl dpo --model_name_or_path m --dataset_name d", "run.sh")])
    with pytest.raises(UserError, match=r"run.sh:1:\d+: `learning_rate` must be a number"):
        import_files([written("trl sft --learning_rate fast", "run.sh")])


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


def test_deepspeed_alone_says_how_and_not_what() -> None:
    imported = import_files([written(DEEPSPEED, "ds.json")])
    job = checked(imported).job
    assert imported.missing == ("task", "model", "data")
    assert "EXAMPLES" in imported.text
    parts, train = job.parallel, job.train
    assert (parts.data, parts.shard, parts.offload) == (8, "zero3", "params")
    assert (train.batch, train.micro_batch, train.accumulation, train.clip) == (64, 4, 2, 0.5)
    assert (train.lr, train.beta1, train.beta2, train.eps, train.weight_decay) == (3e-5, 0.8, 0.95, 1e-7, 3e-7)
    assert (train.schedule, train.warmup, train.min_lr, train.precision, job.steps) == (
        "cosine",
        100,
        0.1,
        "bf16",
        5000,
    )
    said = import_files(["ds.json"], overrides=["task=pretrain", "model=org/m", "data=mine.txt", "train.lr=1e-5"])
    assert said.missing == ()
    assert (checked(said).job.data[0].path, checked(said).job.train.lr) == ("mine.txt", 1e-5)


@pytest.mark.parametrize(("stage", "shard"), [(0, "none"), (1, "zero1"), (2, "zero2"), (3, "zero3")])
def test_zero_stages(stage: int, shard: str) -> None:
    given = written({"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": 1}, "ds.json")
    assert checked(import_files([given], processes=2)).job.parallel.shard == shard
    with pytest.raises(UserError, match=r"ds.json:1:15: `optimizer` must be a block of keys, not 'Adam'"):
        import_files([written('{"optimizer": "Adam"}', "ds.json")], format="deepspeed")
    with pytest.raises(UserError, match="there is no ZeRO stage 4"):
        import_files([written({"zero_optimization": {"stage": 4}}, "ds.json")])


def test_what_deepspeed_has_and_stoker_not() -> None:
    text = {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}, "zero_quantized_gradients": True},
        "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5}},
        "optimizer": {"type": "Lamb", "params": {"lr": 1e-3}},
    }
    imported = import_files([written(text, "ds.json")], processes=2)
    checked(imported)
    assert lost(imported) == {
        "zero_optimization.offload_optimizer.device", "zero_optimization.zero_quantized_gradients", "scheduler.type",
        "optimizer.type",
    }  # fmt: skip


def test_accelerate_s_megatron_and_axes() -> None:
    megatron = (
        "distributed_type: MEGATRON_LM\nnum_processes: 8\nmegatron_lm_config: {megatron_lm_tp_degree: 2, "
        "megatron_lm_pp_degree: 2, megatron_lm_num_micro_batches: 4, megatron_lm_sequence_parallelism: true, "
        "megatron_lm_use_distributed_optimizer: true, megatron_lm_gradient_clipping: 1.0, "
        "megatron_lm_recompute_activations: true}\n"
    )
    job = checked(import_files([written(megatron)])).job
    parts = job.parallel
    assert (parts.data, parts.tensor, parts.pipeline, parts.shard) == (2, 2, 2, "zero1")
    assert (parts.sequence, parts.recompute, job.train.accumulation) == (True, "selective", 4)
    axes = ACCELERATE + (
        "parallelism_config: {parallelism_config_dp_replicate_size: 2, parallelism_config_dp_shard_size: 2, "
        "parallelism_config_tp_size: 2, parallelism_config_cp_size: 1, "
        "parallelism_config_cp_comm_strategy: allgather}\n"
    )
    parts = checked(import_files([written(axes)])).job.parallel
    assert (parts.data, parts.shard_size, parts.tensor, parts.shard) == (4, 2, 2, "zero3")
    odd = megatron.replace("num_processes: 8", "num_processes: 6")
    with pytest.raises(UserError, match="6 processes are no multiple of tensor x pipeline x context = 4"):
        import_files([written(odd)])


def test_accelerate_s_deepspeed_block() -> None:
    block = "{zero_stage: 3, offload_param_device: cpu, offload_optimizer_device: cpu, zero3_init_flag: true}"
    given = written(ACCELERATE, distributed_type="DEEPSPEED", deepspeed_config=block, num_processes="2")
    imported = import_files([given])
    parts = checked(imported).job.parallel
    assert (parts.shard, parts.offload, parts.data) == ("zero3", "params", 2)
    assert why(imported, "fsdp_config") == "idle: the file does not ask for FSDP"


def test_torchtune_s_values_and_defaults() -> None:
    imported = import_files([written(TORCHTUNE)])
    job = checked(imported).job
    assert job.model is not None
    assert (job.task, job.model.name, job.output) == ("sft", "org/llama-8b", "out/lora")
    assert job.tune.targets == ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert (job.data[0].path, job.data[0].template) == ("yahma/alpaca-cleaned", "plain")
    assert (job.train.lr, job.train.schedule, job.train.warmup, job.train.clip) == (3e-4, "cosine", 100, 0.0)
    assert (job.train.micro_batch, job.train.accumulation, job.epochs) == (2, 8, 1.0)
    assert lost(imported) == {"dataset.train_on_input"}
    assert next(i.value for i in imported.dropped if i.key == "metric_logger.log_dir") == "out/lora/logs"


def test_torchtune_distributed_chat_and_other_recipes() -> None:
    chat = (
        "dataset:\n  _component_: torchtune.datasets.chat_dataset\n  source: json\n  data_files: talk.json\n"
        "  conversation_column: dialog\n  conversation_style: sharegpt\n  packed: True\n"
    )
    start, rest = TORCHTUNE.split("dataset:\n")
    text = start + chat + rest.split("packed: False\n")[1] + "fsdp_cpu_offload: True\ntensor_parallel_dim: 2\n"
    job = checked(import_files([written(text)], processes=8)).job
    assert (job.data[0].path, job.data[0].format) == ("talk.json", "sharegpt")
    assert job.data[0].columns == {"conversations": "dialog"}
    assert (job.parallel.data, job.parallel.tensor, job.parallel.shard) == (4, 2, "zero3")
    assert (job.parallel.offload, job.train.pack) == ("params", True)
    dpo = TORCHTUNE.replace("torchtune.modules.loss.LinearCrossEntropyLoss", "torchtune.rlhf.loss.DPOLoss")
    with pytest.raises(UserError, match="Stoker cannot train `dpo` yet"):
        import_files([written(dpo)])


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
