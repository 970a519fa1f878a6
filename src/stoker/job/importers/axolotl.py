"""Axolotl's YAML: its own names for model, adapter, sequences and training, data sets by prompt type."""

from __future__ import annotations

from stoker.job.document.yaml_document import JobDocument
from stoker.job.importers.adapter_keys import AdapterKeys, carry_bits, read_adapter
from stoker.job.importers.axolotl_data import read_data
from stoker.job.importers.config_reader import ConfigReader
from stoker.job.importers.deepspeed import read_deepspeed_key
from stoker.job.importers.foreign_names import (
    carry_schedule,
    drop_experts,
    drop_warmup_of_constant,
    task_not_carried,
    task_of,
    tuning_of,
)
from stoker.job.importers.fsdp import read_fsdp
from stoker.job.importers.offload import carry_activation_offload
from stoker.job.importers.policies import trl_grpo
from stoker.job.importers.tokens import carry_stop, carry_tokens
from stoker.job.importers.trainer_arguments import EPOCH, carry_length, leave_trust, read_optimizer
from stoker.job.importers.trainer_arguments import FREE as TRAINER_FREE
from stoker.job.importers.trainer_arguments import LOST as TRAINER_LOST
from stoker.job.importers.trl import PEFT_TARGETS

FREE = {
    "transformers finds the classes": "model_type tokenizer_type processor_type base_model_config cls_model_config "
    "is_falcon_derived_model is_llama_derived_model is_mistral_derived_model is_qwen_derived_model tokenizer_use_fast "
    "tokenizer_legacy tokenizer_use_mistral_common tokenizer_save_jinja_files base_model_ignore_patterns",
    "a job of Stoker is always strict": "strict",
    "what is trained is held in float32": "embeddings_skip_upcast peft_autocast_adapter_dtype",
    "Stoker streams by a source's size": "streaming",
    "a checkpoint of Stoker fits every layout": "fsdp_final_state_dict_type",
    "Stoker caches by content, and tokenises in parallel by itself": "dataset_prepared_path dataset_processes "
    "dataset_keep_in_memory skip_prepare_dataset "
    "push_dataset_to_hub hf_use_auth_token sample_packing_group_size sample_packing_bin_size "
    "sample_packing_sequentially eval_sample_packing pad_to_sequence_len multipack_real_batches "
    "batch_flattening pretrain_multipack_buffer_size pretrain_multipack_attn streaming_multipack_buffer_size "
    "pretraining_sample_concatenation sample_packing_eff_est total_num_tokens total_supervised_tokens "
    "is_preprocess preprocess_iterable axolotl_config_path",
    "rows are always shuffled": "shuffle_merged_datasets shuffle_before_merging_datasets",
    "Stoker uses PyTorch's attention and kernels": "flash_attention xformers_attention sdp_attention flex_attention "
    "eager_attention sage_attention flash_attn_cross_entropy flash_attn_rms_norm "
    "flash_attn_fuse_qkv flash_attn_fuse_mlp flash_optimum flex_attn_compile_kwargs unsloth_cross_entropy_loss "
    "unsloth_lora_mlp unsloth_lora_qkv unsloth_lora_o unsloth_rms_norm unsloth_rope lora_mlp_kernel lora_qkv_kernel "
    "lora_o_kernel use_kernels liger_rope liger_rms_norm liger_glu_activation liger_layer_norm "
    "liger_fused_linear_cross_entropy cut_cross_entropy ring_attn_func heads_k_stride experimental_skip_move_to_device",
    "a tracker that Stoker does not feed": "wandb_entity wandb_watch wandb_name wandb_run_id "
    "wandb_log_model wandb_mode use_wandb mlflow_tracking_uri mlflow_run_name use_mlflow "
    "hf_mlflow_log_artifacts use_comet comet_api_key comet_workspace comet_project_name use_otel_metrics "
    "trackio_project_name use_trackio",
    "processes and devices are Stoker's or the launcher's to start": "world_size device device_map ddp "
    "max_memory gpu_memory_limit use_ray",
    "`stoker eval` and `stoker chat` are for this": "eval_table_size eval_max_new_tokens do_causal_lm_eval "
    "eval_causal_lm_metrics do_bench_eval bench_dataset bench_split eval_batch_size gradio_title gradio_share",
    "every step is logged": "profiler_steps include_tkps gc_steps",
    "the same command goes on where the run stopped": "auto_resume_from_checkpoints",
    "`faults.spike` watches the loss by its own past": "loss_watchdog_threshold loss_watchdog_patience",
    "a checkpoint is always whole": "save_first_step",
    "exporting is `stoker export`": "merge_lora merge_method lora_on_cpu",
    "where the blocks are is a fact of the model's family": "peft_layers_pattern",
    "tied weights stay tied": "peft_ensure_weight_tying",
    "transposed weights are found by the model's kind": "lora_fan_in_fan_out",
    "double quantisation and nf4 are what 4 bits mean here": "bnb_config_kwargs.* qlora_sharded_model_loading",
    "idle: for a method that the file does not use": "relora_prune_ratio relora_prune_method relora_cpu_offload "
    "loraplus_lr_embedding lisa_step_interval lisa_layers_attr vllm.* trl.* orpo_alpha rpo_alpha simpo_gamma cpo_alpha "
    "kto_desirable_weight kto_undesirable_weight rl_beta max_prompt_len dpo_use_weighting "
    "dpo_use_logits_to_keep num_labels gptq jagged_restart_steps jagged_restart_warmup_steps",
    "a plugin of Axolotl": "plugins",
    "padding never counts": "special_tokens.pad_token",
    "new rows begin as the mean of what they consisted of": "mean_resizing_embeddings",
    "rows come in multiples of 64": "resize_token_embeddings_to_32x",
}
LOST = {
    "every row of a source is read": "dataset_shard_num dataset_shard_idx",
    "training begins from the model alone: merge the adapter first": "lora_model_dir",
    "whole modules are trained beside an adapter, not single rows": "peft_trainable_token_indices",
    "an adapter's variant that Stoker does not have": "relora peft_layer_replication "
    "peft_init_lora_weights peft.* lisa_n_layers",
    "all weights or an adapter's": "unfrozen_parameters",
    "tokens keep their names and their trained rows": "added_tokens_overrides fix_untrained_tokens shrink_embeddings",
    "a role that Stoker does not know": "special_tokens.*",
    "rows are shuffled, and short ones kept": "curriculum_sampling min_sample_len dataset_exact_deduplication",
    "a base that is quantised already": "model_quantization_config model_quantization_config_kwargs.*",
    "the model's code stays as transformers has it": "s2_attention rope_scaling.* use_pose "
    "pose_split_on_token_ids pose_max_context_len pose_num_chunks llama4_linearized_experts "
    "overrides_of_model_kwargs.*",
    "one learning rate and its plain schedule": "embedding_lr embedding_lr_scale lr_groups lr_quadratic_warmup "
    "cosine_constant_lr_ratio lr_div_factor adam_beta3 adam_epsilon2 torchdistx_path",
    "Stoker computes in bf16, fp16 or fp32": "qat.* quantization.*",
    "no system message is added": "default_system_message",
}


KEYS = AdapterKeys(
    rank="lora_r",
    rslora="peft_use_rslora",
    dora="peft_use_dora",
    targets="lora_target_modules",
    every="all-linear",
    modules="lora_modules_to_save",
    parameters="lora_target_parameters",
    loraplus="loraplus_lr_ratio",
    layers="peft_layers_to_transform",
    others="lora_target_linear load_in_4bit load_in_8bit",
)


def read_axolotl(document: JobDocument) -> ConfigReader:
    """Reads a training file of Axolotl; a DeepSpeed file that it names is read with it."""
    config = ConfigReader(document, "Axolotl")
    has_task = False
    for key in ("rl", "reward_model", "process_reward_model"):
        word = config.text(key)
        if key == "rl" and word == "grpo":
            task_of(config, key, word)
            trl_grpo(config, ("trl",), kl=0.001, loss="bnpo")
            has_task = True
        elif word is not None and word.lower() not in ("false", "no"):
            task_not_carried(config, key, word if key == "rl" else "reward")
            has_task = True
    config.take_all(
        ("base_model", "model.name"),
        ("tokenizer_config", "model.tokenizer"),
        ("revision_of_model", "model.revision"),
        ("output_dir", "output"),
    )
    if isinstance(changes := config.value("overrides_of_model_config"), dict):
        config.carry("overrides_of_model_config", "model.config", changes)
    leave_trust(config)
    _tuning(config)
    carry_stop(config, "special_tokens.eos_token", "eot_tokens")
    for role in ("bos", "unk"):
        config.take(f"special_tokens.{role}_token", f"model.special_tokens.{role}")
    added = carry_tokens(config, "tokens", "special_tokens.additional_special_tokens")
    read_data(config, default_task=not has_task, added=added)
    _training(config)
    _precision(config)
    _saving(config)
    _layout(config)
    config.sweep([FREE, TRAINER_FREE], [LOST, TRAINER_LOST])
    return config


def _tuning(config: ConfigReader) -> None:
    adapter, four = config.text("adapter"), config.flag("load_in_4bit")
    if adapter is None:
        config.default("tune.method", "full")
        config.idle("idle without an adapter", *KEYS.all)
        return
    tuning_of(config, "adapter", "qlora" if adapter == "lora" and four else adapter)
    carry_bits(config, four=four, eight=config.flag("load_in_8bit") and adapter != "qlora")
    read_adapter(config, KEYS, all_linear="lora_target_linear", default=PEFT_TARGETS.replace("TRL", "Axolotl"))


def _training(config: ConfigReader) -> None:
    lr = config.take("learning_rate", "train.lr")
    batch, micro = config.whole("batch_size"), config.take("micro_batch_size", "train.micro_batch", 1) or 1
    if batch is None:
        config.take("gradient_accumulation_steps", "train.accumulation", 1)
    elif batch % micro:
        config.problem("batch_size", f"`batch_size` must be a multiple of `micro_batch_size`, which is {micro}")
    else:
        config.carry("batch_size", "train.accumulation", batch // micro, "batch_size is that of a process")
    carry_length(config, "num_epochs", 1.0)
    carry_schedule(config, "lr_scheduler", lr=lr)
    config.take("cosine_min_lr_ratio", "train.min_lr")
    ratio = config.number("warmup_ratio")
    if drop_warmup_of_constant(config, "lr_scheduler"):
        pass
    elif config.take("warmup_steps", "train.warmup") is not None:
        config.idle("warmup_steps wins, there as here", "warmup_ratio")
    elif ratio is not None:
        config.carry("warmup_ratio", "train.warmup", float(ratio) or 0)
    else:
        config.default("train.warmup", 0.03, "at most 100 steps there")
    read_optimizer(config, "optimizer")


def _precision(config: ConfigReader) -> None:
    bf16 = config.value("bf16")
    if bf16 in ("auto", "full") or config.value("bfloat16") is True or (bf16 is not None and config.flag("bf16")):
        key = "bf16" if bf16 not in (None, False) else "bfloat16"
        config.carry(key, "train.precision", "auto" if bf16 == "auto" else "bf16")
        others = "the precision is bf16's to say"
    elif config.flag("fp16") or config.flag("float16"):
        config.carry("fp16" if config.flag("fp16") else "float16", "train.precision", "fp16")
        others = "off: fp16 is on"
    elif bf16 is None and config.value("fp16") is None:
        config.default("train.precision", "auto", "bf16 where the device is fast at it")
        others = "the precision is bf16's to say"
    else:
        config.default("train.precision", "fp32", "neither bf16 nor fp16 is on")
        others = "off"
    config.idle(others, "bf16", "fp16", "bfloat16", "float16", "float32")


def _saving(config: ConfigReader) -> None:
    for word, home, part in (("eval", "evaluate", "a tenth of all"), ("save", "checkpoint", "a fifth, at most 500")):
        steps = config.number(f"{word}_steps")
        if steps is not None and steps >= 1:
            config.carry(f"{word}_steps", f"{home}.every", int(steps))
        elif steps is not None:
            config.drop(f"{word}_steps", "a share of all steps, which are known once the data is counted")
        for key in (f"{word}s_per_epoch", f"{word}_strategy", *["evaluation_strategy"] * (word == "eval")):
            config.drop(key, "said by its steps" if steps else f"{EPOCH} {part}")
    config.take("save_total_limit", "checkpoint.keep", 4)
    config.take("load_best_model_at_end", "checkpoint.best", note="it is kept beside the newest")
    config.take("use_tensorboard", "train.tensorboard")
    for key, target in (("wandb_project", "train.wandb"), ("mlflow_experiment_name", "train.mlflow")):
        if config.text(key):  # its examples have empty ones
            config.take(key, target)
        else:
            config.idle("empty", key)


def _layout(config: ConfigReader) -> None:
    recompute = config.value("gradient_checkpointing")
    if recompute is not None:
        offloaded = isinstance(recompute, str) and (recompute == "unsloth" or "offload" in recompute)
        asked = offloaded or config.flag("gradient_checkpointing")
        config.carry("gradient_checkpointing", "parallel.recompute", "full" if asked else "none")
        if offloaded:
            config.also("parallel.offload", "activations")
    if config.value("activation_offloading") in ("legacy", "hidden_states"):
        config.carry("activation_offloading", "parallel.offload", "activations")
    elif config.value("activation_offloading") == "disk":
        config.drop("activation_offloading", "Stoker offloads to the host's memory only", matters=True)
    else:
        carry_activation_offload(config, "activation_offloading")
    if config.value("torch_compile") == "auto":
        config.carry("torch_compile", "train.compile", "auto")
    else:
        config.take("torch_compile", "train.compile")
    config.take_all(
        ("tensor_parallel_size", "parallel.tensor"),
        ("context_parallel_size", "parallel.context"),
        ("sequence_parallel_degree", "parallel.context"),
    )
    drop_experts(config, "expert_parallel_size")
    shard, replicate = config.whole("dp_shard_size"), config.whole("dp_replicate_size")
    if shard is not None:
        config.carry("dp_shard_size", "parallel.data", shard * (replicate or 1), "dp_shard_size x dp_replicate_size")
        config.also("parallel.shard_size", shard)
        config.drop("dp_replicate_size", "`data` holds it")
    else:
        config.take("dp_replicate_size", "parallel.data")
    read_deepspeed_key(config)
    read_fsdp(config)
