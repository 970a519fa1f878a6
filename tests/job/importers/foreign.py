"""Files of the tools in the shapes that they ship, rewritten by hand, and what is asked of an import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stoker.job.document.yaml_document import parse_document
from stoker.job.importers import Imported
from stoker.job.load_job import LoadedJob, check_document

LLAMA_FACTORY = """
model_name_or_path: org/base-4b
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
