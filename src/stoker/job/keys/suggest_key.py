"""Suggestions for an unknown key: the nearest key, the right block, another tool's name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from stoker.job.keys.key_paths import KeyPath, block_at, dotted, parents_of_keys, parse_key
from stoker.job.targets import KINDS
from stoker.job.task_spec import TASKS

# Other trainers' names of the same value, which can be moved unchanged.
SAME_VALUE = {
    "train.lr": "learning_rate lrate learningrate peak_lr max_lr",
    "train.batch": "batch_size global_batch_size train_batch_size total_batch_size",
    "train.micro_batch": "per_device_train_batch_size micro_batch_size micro_batchsize device_batch_size "
    "train_micro_batch_size_per_gpu",
    "train.accumulation": "gradient_accumulation_steps grad_accum gradient_accumulation accumulation_steps "
    "grad_accum_steps accumulate_grad_batches",
    "train.seq_len": "cutoff_len max_seq_length max_seq_len sequence_len sequence_length seq_length "
    "block_size context_length max_length model_max_length",
    "train.pack": "packing sample_packing",
    "train.optimizer": "optim optimiser",
    "train.beta1": "adam_beta1",
    "train.beta2": "adam_beta2",
    "train.eps": "adam_epsilon epsilon",
    "train.schedule": "lr_scheduler_type lr_scheduler scheduler lr_schedule",
    "train.warmup": "warmup_steps warmup_ratio num_warmup_steps",
    "train.clip": "max_grad_norm grad_clip gradient_clipping gradient_clip_val clip_grad",
    "train.compile": "torch_compile",
    "train.deterministic": "full_determinism use_deterministic_algorithms",
    "steps": "max_steps num_steps train_steps max_iters train_iters total_steps iterations",
    "epochs": "num_train_epochs num_epochs n_epochs max_epochs epoch",
    "seed": "random_seed data_seed",
    "output": "output_dir out_dir save_dir run_dir",
    "model": "base_model model_name_or_path model_name pretrained_model_name_or_path model_path checkpoint_dir",
    "model.tokenizer": "tokenizer_name tokenizer_name_or_path tokenizer_path",
    "model.revision": "model_revision revision_of_model",
    "model.quantise": "quantize quantization quantisation",
    "model.stop": "eos_token stop_token stop_words",
    "model.special_tokens.additional": "additional_special_tokens",
    "data": "dataset datasets train_file train_data data_path dataset_name train_dataset dataset_path",
    "evaluate.data": "eval_dataset eval_data test_datasets validation_file val_data val_dataset",
    "evaluate.fraction": "val_size val_set_size test_size eval_fraction validation_split",
    "evaluate.samples": "num_samples_to_generate generate_samples",
    "evaluate.every": "eval_steps eval_interval eval_every",
    "checkpoint.every": "save_steps save_interval save_every checkpoint_every",
    "checkpoint.keep": "save_total_limit",
    "tune.method": "finetuning_type",
    "tune": "adapter peft tuning",
    "tune.rank": "lora_r lora_rank",
    "tune.alpha": "lora_alpha",
    "tune.dropout": "lora_dropout",
    "tune.targets": "lora_target lora_target_modules target_modules",
    "tune.rslora": "use_rslora",
    "tune.dora": "use_dora peft_use_dora",
    "tune.layers": "layers_to_transform lora_layers_to_transform peft_layers_to_transform",
    "tune.modules_to_save": "lora_modules_to_save additional_target",
    "tune.loraplus_ratio": "loraplus_lr_ratio lora_plus_ratio",
    "tune.tokens": "num_virtual_tokens pre_seq_len prefix_length prompt_length",
    "tune.text": "prompt_tuning_init_text",
    "tune.projection": "prefix_projection",
    "tune.width": "encoder_hidden_size",
    "parallel.data": "dp dp_size data_parallel data_parallel_size data_parallel_degree",
    "parallel.tensor": "tp tp_size tensor_parallel tensor_parallel_size tensor_parallel_degree "
    "tensor_model_parallel_size",
    "parallel.sequence": "sequence_parallel sequence_parallelism",
    "parallel.async_tensor": "async_tp enable_async_tensor_parallel",
    "parallel.pipeline": "pp pp_size pipeline_parallel pipeline_parallel_size pipeline_parallel_degree "
    "pipeline_model_parallel_size",
    "parallel.context": "cp cp_size context_parallel context_parallel_size context_parallel_degree",
    "parallel.expert": "ep ep_size expert_parallel_size expert_parallel_degree expert_model_parallel_size",
    "parallel.recompute": "recompute_granularity",
    "parallel.devices": "gpu_ids device_ids",
}
ALIASES = {alias: target for target, names in SAME_VALUE.items() for alias in names.split()}

# The same, if the name means this only inside one block.
IN_BLOCK = {
    ("model", "path"): "model.name",
    ("model", "id"): "model.name",
    ("model", "name_or_path"): "model.name",
    ("data", "file"): "data.path",
    ("data", "name"): "data.path",
    ("data", "dataset"): "data.path",
    ("data", "type"): "data.format",
    ("data", "chat_template"): "data.template",
    ("tune", "r"): "tune.rank",
    ("tune", "type"): "tune.method",
    ("tune", "name"): "tune.method",
    ("parallel", "compile"): "train.compile",
    ("evaluate", "steps"): "evaluate.every",
    ("evaluate", "max_rows"): "evaluate.rows",
    ("evaluate", "max_samples"): "evaluate.rows",
    ("checkpoint", "steps"): "checkpoint.every",
    ("ssh", "host_file"): "target.ssh.hostfile",
    ("ssh", "key"): "target.ssh.identity",
    ("ssh", "identity_file"): "target.ssh.identity",
    ("ssh", "proxy_jump"): "target.ssh.jump",
    ("ssh", "workdir"): "target.ssh.folder",
    **{
        (kind, name): f"target.{kind}.{key}"
        for kind in KINDS
        for key, names in {
            "devices": "gpus slots gpus_per_node ntasks_per_node nproc_per_node processes",
            "nodes": "num_nodes nnodes replicas",
            "environment": "env variables",
        }.items()
        for name in names.split()
    },
    ("", "name"): "output",
    ("slurm", "walltime"): "target.slurm.time",
    ("slurm", "cpus_per_task"): "target.slurm.cpus",
    ("slurm", "mem"): "target.slurm.memory",
    ("slurm", "container_image"): "target.slurm.image",
    ("slurm", "container_mounts"): "target.slurm.mounts",
    ("ray", "dashboard"): "target.ray.address",
}

# Names whose values must be written differently here.
HINTS = {
    "bf16": "write `precision: bf16` under `train:`",
    "fp16": "write `precision: fp16` under `train:`",
    "dtype": "write `precision: bf16`, `fp16` or `fp32` under `train:`",
    "torch_dtype": "write `precision: bf16`, `fp16` or `fp32` under `train:`",
    "mixed_precision": "write `precision: bf16` or `fp16` under `train:`",
    "load_in_4bit": "write `tune: qlora`, or `quantise: 4bit` under `model:`",
    "load_in_8bit": "write `quantise: 8bit` under `model:`",
    "quantization_bit": "write `quantise: 4bit` or `8bit` under `model:`",
    "gradient_checkpointing": "write `recompute: full` under `parallel:`",
    "activation_checkpointing": "write `recompute: full` under `parallel:`",
    "deepspeed": "write `shard: zero1`, `zero2` or `zero3` under `parallel:`",
    "zero_stage": "write `shard: zero1`, `zero2` or `zero3` under `parallel:`",
    "zero_optimization": "write `shard: zero1`, `zero2` or `zero3` under `parallel:`",
    "fsdp": "write `shard: zero3` under `parallel:`",
    "fsdp_config": "write `shard: zero3` under `parallel:`",
    "fsdp_version": "remove it, and write `shard: zero3` under `parallel:`",
    "pipeline_schedule": "write `schedule: 1f1b`, `interleaved` or `zero-bubble` under `parallel:`",
    "pipeline_parallel_schedule": "write `schedule: 1f1b`, `interleaved` or `zero-bubble` under `parallel:`",
    "gpus": "write `devices: [0, 1]` or `data: 2` under `parallel:`",
    "cpu_offload": "write `offload: optimizer`, or `params` beside `shard: zero3`, under `parallel:`",
    "activation_offloading": "write `offload: activations` under `parallel:`",
    "sequence_parallel_size": "write `context: 2` and `context_by: ulysses` under `parallel:`",
    "ulysses_degree": "write `context: 2` and `context_by: ulysses` under `parallel:`",
    "num_processes": "write `data: 2` under `parallel:` (processes = data x tensor x pipeline x context)",
    "nproc_per_node": "write `data: 2` under `parallel:` (processes = data x tensor x pipeline x context)",
    "num_gpus": "write `data: 2` under `parallel:` (processes = data x tensor x pipeline x context)",
    "world_size": "write `data: 2` under `parallel:` (processes = data x tensor x pipeline x context)",
    "stage": "write `task: pretrain` or `task: sft`",
    "max_samples": 'write `split: "[:1000]"` in the source\'s block under `data:`',
    "chat_template": "write `template` in the source's block under `data:`",
    "train_on_inputs": "write `train_on: everything` in the source's block under `data:`, or remove it",
    "train_on_prompt": "write `train_on: everything` in the source's block under `data:`, or remove it",
    "mask_history": "write `train_on: last` in the source's block under `data:`, or remove it",
    "enable_thinking": "write `template_arguments: {enable_thinking: false}` in the source's block under `data:`",
    "resume_from_checkpoint": "remove it: the same command resumes the run where it stopped",
    "overwrite_output_dir": "remove it: give each run its own `output`",
    "from": "write `name`; `from` names an earlier stage, in a file with `stages`",
    "do_train": "remove it: `stoker train` trains",
    "do_eval": "remove it: `evaluate:` sets the data and the interval",
    "val_set": "write `data` under `evaluate:`",
}


# Other trainers' names of loggers and their settings, at the top of a job or under `train:`.
LOGGING = re.compile(r"(use_)?(log|logger|logging|logs|tracker|wandb|mlflow|comet|trackio|swanlab)(_\w+)?|report_to")
LOGGED = (
    "remove it: every step is logged to `metrics.jsonl`; for trackers write `tensorboard: true`, `wandb: PROJECT` or "
    "`mlflow: EXPERIMENT` under `train:`"
)


@dataclass(frozen=True)
class Suggestion:
    """The text of a suggestion, the target key (None if unknown), and whether it is unambiguous."""

    text: str
    target: KeyPath | None = None
    certain: bool = False


def suggest_key(parent: KeyPath, key: str) -> Suggestion:
    """Suggests a key instead of the unknown key in the block at ``parent``."""
    name = re.sub(r"[\s-]+", "_", key.strip().lower())
    level = tuple(part for part in parent if isinstance(part, str))
    block = block_at(parent)
    here = list(block.model_fields) if block is not None else []
    if name in here:
        return _move(parent, (*level, name), certain=True)
    alias = IN_BLOCK.get((level[-1] if level else "", name))
    alias = alias or ALIASES.get(name)
    if alias is not None:
        return _move(parent, parse_key(alias), certain=True)
    if hint := _hint(level, name):
        return Suggestion(hint)
    homes = [home for home in parents_of_keys().get(name, ()) if home != level]
    shared = [home for home in homes if len(home) < 2 or home[0] not in TASKS]  # not nested in a single task's block
    homes = shared or homes
    if len(homes) == 1:
        under = f"belongs under `{dotted(homes[0])}:`" if homes[0] else "belongs at the top level"
        return Suggestion(f"`{name}` {under}", (*homes[0], name), certain=homes[0][:1] not in (("data",), ("target",)))
    if homes:
        places = " or ".join(f"under `{dotted(home)}:`" if home else "at the top level" for home in homes)
        return Suggestion(f"`{name}` belongs {places}")
    return _by_likeness(parent, level, name, here)


def _hint(level: KeyPath, name: str) -> str:
    """Returns how to write what another trainer's key says; empty for other keys."""
    if not level and difflib.get_close_matches(name, ["stages"], cutoff=0.8):
        return "write `stages`"  # not a key of a job, but of a file with several
    if level in ((), ("train",)) and LOGGING.fullmatch(name):
        return LOGGED
    return HINTS.get(name, "")


def _by_likeness(parent: KeyPath, level: KeyPath, name: str, here: list[str]) -> Suggestion:
    near = difflib.get_close_matches(name, here, n=2, cutoff=0.6)
    if near:
        near.sort(key=lambda word: sorted(word) != sorted(name))  # swapped letters before missing ones
        # Sure only of a slip of the finger: most letters agree, and no second key is about as near.
        scores = [difflib.SequenceMatcher(None, name, word).ratio() for word in near]
        sure = scores[0] >= 0.8 and (len(near) == 1 or scores[0] - scores[1] > 0.1)
        return _move(parent, (*level, near[0]), certain=sure)
    elsewhere = difflib.get_close_matches(name, [*parents_of_keys(), *ALIASES], n=1, cutoff=0.8)
    if elsewhere and elsewhere[0] in ALIASES:
        return _move(parent, parse_key(ALIASES[elsewhere[0]]), certain=False)
    if elsewhere:
        homes = parents_of_keys()[elsewhere[0]]
        return _move(parent, (*homes[0], elsewhere[0]), certain=False)
    return Suggestion(f"remove it; the keys here are {', '.join(here)}" if here else "remove it")


def _move(parent: KeyPath, target: KeyPath, *, certain: bool) -> Suggestion:
    """Suggests the target's name, with its block if it is not the key's block."""
    level = tuple(part for part in parent if isinstance(part, str))
    if target[:-1] == level:
        return Suggestion(f"write `{target[-1]}`", (*parent, target[-1]), certain)
    if len(target) == 1:
        return Suggestion(f"write `{target[0]}` at the top level", target, certain)
    return Suggestion(f"write `{target[-1]}` under `{dotted(target[:-1])}:`", target, certain and target[0] != "data")


# Other trainers' names of values.
VALUES = {
    "pt": "pretrain", "pretraining": "pretrain", "finetune": "sft", "instruct": "sft", "freeze": "full",
    "ptuning": "p-tuning", "p_tuning": "p-tuning", "prefix_tuning": "prefix", "prefix-tuning": "prefix",
    "prompt_tuning": "prompt", "prompt-tuning": "prompt",
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32",
    "float64": "fp64", "double": "fp64",
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adam": "adamw", "constant_with_warmup": "constant",
    "alpaca": "instruction", "openai": "messages", "chat": "messages", "completion": "prompt",
    "dpo": "preference",
    "fsdp": "zero3", "full_shard": "zero3", "shard_grad_op": "zero2", "ddp": "none", "zero": "zero1",
    "0": "none", "1": "zero1", "2": "zero2", "3": "zero3",
    "interleaved1f1b": "interleaved", "interleavedzerobubble": "zero-bubble", "zb1p": "zero-bubble",
    "zerobubble": "zero-bubble", "zbvzerobubble": "zbv", "zb-v": "zbv",
    "all-gather": "gather", "allgather": "gather", "ring": "gather",
    "cpu": "optimizer", "weights": "params", "parameters": "params", "optimiser": "optimizer",
    "truncate": "cut", "nf4": "4bit", "fp4": "4bit", "all": "all-linear",
}  # fmt: skip


def nearest(word: str, options: Iterable[str]) -> str | None:
    """Returns the option most similar to a word, of equals the one with the nearest number; None if none is similar."""
    options = list(options)
    meant = VALUES.get(word.lower())
    if meant in options:
        return meant
    number = re.search(r"\d+", word)

    def distance(option: str) -> tuple[float, int]:
        other = re.search(r"\d+", option)
        gap = abs(int(number[0]) - int(other[0])) if number and other else 0
        return -difflib.SequenceMatcher(None, word.lower(), option.lower()).ratio(), gap

    best = min(options, key=distance, default=None)
    if best is None:
        return None
    alike = -distance(best)[0] >= 0.5 or best.startswith(word.lower())
    return best if alike else None
