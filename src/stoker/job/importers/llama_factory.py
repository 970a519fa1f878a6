"""LLaMA-Factory's YAML: its own flat keys together with those of transformers' trainer."""

from __future__ import annotations

from pathlib import Path

from stoker.job.document.yaml_document import JobDocument
from stoker.job.importers.adapter_keys import AdapterKeys, read_adapter
from stoker.job.importers.config_reader import ConfigReader
from stoker.job.importers.dataset_info import REGISTER, as_text, find_register, source_of
from stoker.job.importers.foreign_data import ForeignSource, carry_share
from stoker.job.importers.foreign_file import find_beside, read_source
from stoker.job.importers.foreign_names import task_of, tuning_of
from stoker.job.importers.policies import factory_ppo
from stoker.job.importers.preferences import factory_preferences
from stoker.job.importers.tokens import carry_tokens, keep_in_content
from stoker.job.importers.trainer_arguments import FREE as TRAINER_FREE
from stoker.job.importers.trainer_arguments import LOST as TRAINER_LOST
from stoker.job.importers.trainer_arguments import TrainerDefaults, read_model, read_trainer_arguments
from stoker.job.keys.key_paths import KeyPath
from stoker.job.task_spec import TASKS

FREE = {
    "read: the register of the data sets": "dataset_dir",
    "Stoker caches by content, and tokenises in parallel by itself": "overwrite_cache preprocessing_num_workers "
    "preprocessing_batch_size tokenized_path cache_dir buffer_size data_shared_file_system",
    "for images, sound and video: not supported": "media_dir image_max_pixels image_min_pixels video_max_pixels "
    "video_min_pixels video_fps video_maxlen image_do_pan_and_scan crop_to_patches use_audio_in_video "
    "audio_sampling_rate freeze_vision_tower freeze_multi_modal_projector",
    "for generating and serving: `stoker chat` has options of its own": "do_sample temperature top_p top_k num_beams "
    "max_length max_new_tokens repetition_penalty length_penalty skip_special_tokens infer_backend "
    "infer_dtype use_kv_cache vllm_maxlen vllm_gpu_util vllm_enforce_eager vllm_max_lora_rank vllm_config "
    "sglang_maxlen sglang_mem_fraction sglang_tp_size sglang_config sglang_lora_backend offload_folder eval_num_beams "
    "predict_with_generate generation_max_length generation_num_beams generation_config",
    "exporting is `stoker export`": "export_dir export_size export_device export_legacy_format export_hub_model_id "
    "export_quantization_bit export_quantization_dataset export_quantization_nsamples export_quantization_maxlen",
    "Stoker uses PyTorch's attention, and its own order of memory": "flash_attn use_unsloth "
    "use_v1_kernels upcast_layernorm upcast_lmhead_output",
    "fast tokenizers only": "use_fast_tokenizer",
    "no effect beside the other keys": "template mask_history train_on_prompt split_special_tokens max_samples "
    "mix_strategy interleave_probs",
    "rows follow the tokens": "resize_vocab",
    "Stoker streams by a source's size": "streaming",
    "padding never counts": "ignore_pad_token_for_loss",
    "double quantisation is on where there are 4 bits": "double_quantization quantization_type quantization_method "
    "quantization_device_map",
    "tokens are never shared, and the hub is asked as its library is set up": "hf_hub_token ms_hub_token om_hub_token "
    "use_modelscope_hub",
    "printed anyway, by `stoker check` and `stoker plan`": "print_param_status include_effective_tokens_per_second "
    "compute_accuracy eval_on_each_dataset",
    "a tracker that Stoker does not feed": "swanlab_workspace swanlab_run_name "
    "swanlab_mode swanlab_api_key swanlab_logdir swanlab_lark_webhook_url swanlab_lark_secret",
    "Ray's: processes are Stoker's or the launcher's to start": "ray_storage_path ray_storage_filesystem "
    "placement_strategy ray_init_kwargs master_addr master_port",
    "idle: for an optimizer or a method that the file does not use": "galore_target galore_rank galore_update_interval "
    "galore_scale galore_proj_type galore_layerwise apollo_target apollo_rank apollo_update_interval apollo_scale "
    "apollo_proj apollo_proj_type apollo_scale_type apollo_layerwise apollo_scale_front badam_mode badam_start_block "
    "badam_switch_mode badam_switch_interval badam_update_ratio badam_mask_mode badam_verbose pissa_iter "
    "pissa_convert loraplus_lr_embedding oft_rank oft_block_size oft_target module_dropout freeze_trainable_layers "
    "freeze_trainable_modules freeze_extra_modules fp8_backend fp8_enable_fsdp_float8_all_gather kt_optimize_rule "
    "cpu_infer chunk_size mode kt_maxlen kt_use_cuda_graph kt_mode kt_force_think",
    "idle: for another task": "pref_bco_weight ppo_buffer_size ppo_epochs ppo_score_norm ppo_target "
    "ppo_whiten_rewards ref_model_adapters ref_model_quantization_bit reward_model reward_model_adapters "
    "reward_model_quantization_bit reward_model_type ld_alpha",
}
LOST = {
    "Stoker has no such optimizer": "use_galore use_apollo use_badam use_adam_mini use_muon",
    "Stoker begins adapters as peft does": "pissa_init",
    "training begins from the model alone: merge the adapter first": "adapter_name_or_path adapter_folder "
    "create_new_adapter",
    "new rows begin as the mean of what they consisted of": "init_special_tokens",
    "write its tokens as `special_tokens` under `model:`": "new_special_tokens_config",
    "no system message is added": "default_system",
    "write the scaling as `model.config.rope_parameters`": "rope_scaling",
    "the model's code stays as transformers has it": "shift_attn mixture_of_depths use_llama_pro",
    "rows are always shuffled": "disable_shuffling",
    "the loss is plain cross entropy": "use_dft_loss use_eaft_loss use_asft_loss",
    "an engine of its own": "use_mca use_kt",
    "all of the language model or its adapter": "freeze_language_model",
    "tools are written as the tokenizer's template has them": "tool_format",
    "thinking is written as the template has it: `template_arguments` in the source's block": "enable_thinking",
}


KEYS = AdapterKeys(
    rank="lora_rank",
    rslora="use_rslora",
    dora="use_dora",
    targets="lora_target",
    every="all",
    modules="additional_target",
    loraplus="loraplus_lr_ratio",
    defaults=(8, None, None),
)


def read_llama_factory(document: JobDocument, data_info: str | None = None) -> ConfigReader:
    """Reads a training file of LLaMA-Factory.

    Args:
        data_info: the register of its data sets, or its folder; by default it is searched for.
    """
    config = ConfigReader(document, "LLaMA-Factory")
    stage, task = config.text("stage"), "sft"
    if stage:
        task = task_of(config, "stage", stage) or ""
    else:
        config.default("task", "sft")
    if stage == "ppo":
        factory_ppo(config)
    factory_preferences(config, stage or "sft")
    read_model(config)
    _tuning(config)
    _data(config, data_info, chat=task not in TASKS or TASKS[task].rows.chat)
    off = "off: recomputation is on by LLaMA-Factory's default"
    disabled = config.switch("disable_gradient_checkpointing", "parallel.recompute", "none", off=off)
    if disabled:
        config.drop("use_unsloth_gc", "nothing is recomputed")
    elif config.switch("use_unsloth_gc", "parallel.recompute", "full", off=off):
        config.also("parallel.offload", "activations")
    read_trainer_arguments(config, TrainerDefaults(recompute=not disabled))
    config.switch("pure_bf16", "train.precision", "bf16", "the weights stay in fp32 where they are trained")
    config.sweep([FREE, TRAINER_FREE], [LOST, TRAINER_LOST])
    return config


def _tuning(config: ConfigReader) -> None:
    bits, method = config.whole("quantization_bit"), config.text("finetuning_type")
    if bits not in (None, 4, 8):
        config.problem("quantization_bit", f"Stoker quantises to 4 or 8 bits, not {bits}", "write 4 or 8")
    tuned: str | None = "lora"
    if bits == 4 and method in (None, "lora"):
        config.carry("quantization_bit", "tune.method", "qlora", "nf4 with double quantisation")
        config.idle("`tune: qlora` holds it", "finetuning_type")
    elif method is None:
        config.default("tune.method", "lora")
    else:
        tuned = tuning_of(config, "finetuning_type", method)
    if bits in (4, 8) and not config.handled("quantization_bit"):
        config.carry("quantization_bit", "model.quantise", f"{bits}bit")
    config.switch("train_from_scratch", "model.weights", "random")
    config.take("moe_aux_loss_coef", "train.router_aux_loss")
    if tuned != "lora":
        config.idle("idle: finetuning_type is not lora", *KEYS.all)
        return
    read_adapter(config, KEYS)


def _data(config: ConfigReader, data_info: str | None, *, chat: bool) -> None:
    config.take("cutoff_len", "train.seq_len", 2048)
    if config.flag("neat_packing"):
        config.carry("neat_packing", "train.pack", True)
        config.idle("neat_packing says it", "packing")
    else:
        note = "documents see each other there, never here" if config.flag("packing") else ""
        config.take("packing", "train.pack", not chat, note)
        config.idle("packed documents never see each other here", "neat_packing")
    added = _tokens(config)
    _sources(config, "dataset", "data", data_info, added, chat=chat)
    _sources(config, "eval_dataset", "evaluate.data", data_info, added, chat=chat)
    if config.value("eval_dataset"):
        config.idle("eval_dataset says it", "val_size")
    else:
        carry_share(config, "val_size")


def _tokens(config: ConfigReader) -> str | KeyPath | None:
    """Returns the tokens that the file adds, and those by which its template ends an answer."""
    tokens_file = config.text("new_special_tokens_config")
    described = find_beside(tokens_file, config.document) if tokens_file is not None else None
    if described is not None:
        names = [str(name) for name in read_source(described).data]
        config.carry("new_special_tokens_config", "model.special_tokens.additional", names, "without descriptions")
        config.idle("new_special_tokens_config wins, there as here", "add_special_tokens", "new_special_tokens")
        return "new_special_tokens_config"
    if config.text("template") == "chatml":
        config.default("model.stop", "<|im_end|>", "the end of a turn in `chatml` takes the end token's place")
    return carry_tokens(config, "add_tokens", "add_special_tokens", "new_special_tokens")


def _sources(
    config: ConfigReader, key: str, home: str, data_info: str | None, added: str | KeyPath | None, *, chat: bool
) -> None:
    names = config.words(key)
    if not names:
        return
    online = config.value("dataset_dir") == "ONLINE"
    register = None if online else find_register(config, data_info)
    weights = _weights(config, len(names)) if home == "data" else []
    for index, name in enumerate(names):
        if register is None and not online and "/" not in name and not Path(name).exists():
            message = f"`{name}` is a name of dataset_info.json, which is not found"
            config.problem(key, message, "name it: `--data-info FILE`", missing_file=REGISTER)
            return
        found = ForeignSource(name) if register is None or "/" in name else source_of(name, register, config, key)
        found = found if chat else as_text(found)
        _shared_settings(config, found, added, chat=chat)
        if weights:
            found.weight, found.keys["weight"] = weights[index], "interleave_probs"
        found.carry(config, key, f"{home}[{index}]")


def _shared_settings(config: ConfigReader, found: ForeignSource, added: str | KeyPath | None, *, chat: bool) -> None:
    """Reads the settings that apply to all data sets of the file."""
    template, limit = config.text("template"), config.whole("max_samples")
    if template is not None and chat:
        found.set_template(template)
        found.keys["template"] = "template"
    if limit is not None:
        found.split, found.keys["split"] = f"{found.split or ''}[:{limit}]", "max_samples"
    for word, target in (("train_on_prompt", "everything"), ("mask_history", "last")):
        if config.flag(word) and chat:
            found.train_on, found.keys["train_on"] = target, word
    if (split := config.flag("split_special_tokens")) is not None:
        found.special_tokens, found.keys["special_tokens"] = "text" if split else "keep", "split_special_tokens"
    thinking = config.flag("enable_thinking")
    if thinking is not None and "qwen3" in (template or "") and chat:
        found.template_arguments, found.keys["template_arguments"] = {"enable_thinking": thinking}, "enable_thinking"
    keep_in_content(found, added)


def _weights(config: ConfigReader, count: int) -> list[float]:
    strategy, written = config.text("mix_strategy") or "concat", config.words("interleave_probs")
    if strategy != "concat" and written and len(written) == count:
        try:
            weights = [float(word) for word in written]
        except ValueError:
            config.problem("interleave_probs", "`interleave_probs` must be numbers with commas")
            return []
        config.drop("mix_strategy", "sources with a `weight` are interleaved")
        return weights
    config.drop("mix_strategy", "sources are mixed in proportion to their rows", matters=strategy != "concat")
    if written:
        config.drop("interleave_probs", "idle: mix_strategy is concat" if strategy == "concat" else "not one a source")
    return []
