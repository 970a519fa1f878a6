"""Recognises the tool of a file by its keys."""

from __future__ import annotations

import difflib

from stoker.errors import Problem, UserError
from stoker.job.document.yaml_document import JobDocument
from stoker.job.importers.foreign_file import SUBCOMMAND
from stoker.job.load_job import STAGES
from stoker.job.schema import Job

# Names as `--from` takes them, and as people write them.
FORMATS = {
    "llama-factory": "LLaMA-Factory",
    "axolotl": "Axolotl",
    "trl": "TRL",
    "torchtune": "torchtune",
    "deepspeed": "DeepSpeed",
    "accelerate": "Accelerate",
}

# Top-level keys that only this tool has.
SIGNS = {
    "llama-factory": "stage finetuning_type cutoff_len template dataset_dir lora_rank lora_target quantization_bit "
    "eval_dataset overwrite_cache preprocessing_num_workers plot_loss val_size max_samples neat_packing mix_strategy "
    "interleave_probs do_train additional_target freeze_trainable_layers flash_attn enable_liger_kernel pref_beta "
    "pref_loss reward_model disable_gradient_checkpointing",
    "axolotl": "base_model base_model_config sequence_len micro_batch_size num_epochs sample_packing adapter "
    "val_set_size test_datasets dataset_prepared_path lr_scheduler strict evals_per_epoch saves_per_epoch "
    "pad_to_sequence_len train_on_inputs lora_target_linear lora_model_dir flash_attention special_tokens "
    "pretraining_dataset wandb_project load_in_4bit_double eval_sample_packing model_type tokenizer_type",
    "trl": "use_peft lora_target_modules dataset_name dataset_config dataset_train_split dataset_test_split "
    "dataset_text_field max_length max_seq_length packing_strategy padding_free assistant_only_loss "
    "completion_only_loss attn_implementation model_revision dtype torch_dtype use_bnb_nested_quant "
    "dataset_streaming test_split_size max_prompt_length num_generations beta truncation_mode eos_token "
    "chat_template_path dataset_num_proc reward_model_name_or_path",
    "deepspeed": "zero_optimization train_micro_batch_size_per_gpu train_batch_size gradient_clipping "
    "zero_allow_untested_optimizer steps_per_print wall_clock_breakdown prescale_gradients communication_data_type "
    "zero_force_ds_cpu_optimizer activation_checkpointing flops_profiler tensor_parallel aio",
    "accelerate": "distributed_type compute_environment num_processes num_machines machine_rank main_training_function "
    "rdzv_backend same_network downcast_bf16 tpu_env tpu_use_cluster tpu_use_sudo use_cpu deepspeed_config "
    "megatron_lm_config main_process_ip main_process_port dynamo_config enable_cpu_affinity parallelism_config",
}
_OWN = {format: frozenset(names.split()) for format, names in SIGNS.items()}
# Keys of transformers' trainer: LLaMA-Factory and TRL both have them.
_SHARED = frozenset(("model_name_or_path", "per_device_train_batch_size", "output_dir", "learning_rate"))
_SUBCOMMANDS = {"sft": "trl", "dpo": "trl", "grpo": "trl", "kto": "trl", "reward": "trl", "rloo": "trl"}


def recognise(document: JobDocument) -> str:
    """Returns the format's name. Raises UserError if the keys fit no format, or two equally."""
    names = set(document.data)
    if any("_component_" in value for value in document.data.values() if isinstance(value, dict)):
        return "torchtune"
    if document.data.get(SUBCOMMAND) in _SUBCOMMANDS:
        return _SUBCOMMANDS[document.data[SUBCOMMAND]]
    points = {format: len(names & own) for format, own in _OWN.items()}
    best = max(points.values())
    first = [format for format, count in points.items() if count == best and best]
    if len(first) == 1:
        return first[0]
    if not first and len(names & _SHARED) > 1:
        first = ["llama-factory", "trl"]
    if len(first) > 1:
        tools = " or ".join(FORMATS[format] for format in first)
        options = " or ".join(f"`--from {format}`" for format in first)
        raise UserError(Problem(f"the keys fit {tools} alike", f"write {options}", file=document.file))
    raise UserError(Problem(*_nothing_fits(document), file=document.file))


def is_own_job(document: JobDocument) -> bool:
    """Returns whether a file is a job of Stoker: it has keys of one, and none that only another tool has."""
    names = set(document.data)
    is_foreign = any(names & own for own in _OWN.values())
    return not is_foreign and bool(names & {"task", STAGES}) and len(names & {STAGES, *Job.model_fields}) > 1


def format_of(name: str) -> str:
    """Returns the format of ``--from``. Raises UserError for unknown ones, with the nearest."""
    wanted = name.lower().replace("_", "-").replace("llamafactory", "llama-factory")
    if wanted in FORMATS:
        return wanted
    near = difflib.get_close_matches(wanted, FORMATS, n=1, cutoff=0.4)
    hint = f"write {near[0]}" if near else f"write one of {', '.join(FORMATS)}"
    raise UserError(Problem(f"there is no importer `{name}`", hint))


def _nothing_fits(document: JobDocument) -> tuple[str, str]:
    names = set(document.data)
    if is_own_job(document):
        return "this is a job of Stoker already", "run `stoker check` on it"
    known = {key: format for format, own in _OWN.items() for key in own}
    likeness = dict.fromkeys(FORMATS, 0.0)
    for name in names:
        for near in difflib.get_close_matches(str(name), known, n=1, cutoff=0.7):
            likeness[known[near]] += difflib.SequenceMatcher(None, str(name), near).ratio()
    nearest = max(likeness, key=lambda format: likeness[format])
    tools = ", ".join(FORMATS.values())
    hint = f"the nearest is {FORMATS[nearest]}: `--from {nearest}`" if likeness[nearest] else "name it by `--from`"
    return f"the keys are of none of {tools}", hint
