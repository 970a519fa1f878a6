"""TRL's YAML or command line: the arguments of its trainers, of the model, and of the data sets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stoker.job.document.yaml_document import JobDocument
from stoker.job.importers.adapter_keys import AdapterKeys, carry_bits, read_adapter
from stoker.job.importers.config_reader import ConfigReader
from stoker.job.importers.foreign_data import LOADERS, SUBSET, ForeignSource, carry_share, data_files, local, take_first
from stoker.job.importers.foreign_file import SUBCOMMAND
from stoker.job.importers.foreign_names import task_of
from stoker.job.importers.policies import trl_grpo
from stoker.job.importers.preferences import trl_preferences
from stoker.job.importers.tokens import carry_stop
from stoker.job.importers.trainer_arguments import FREE as TRAINER_FREE
from stoker.job.importers.trainer_arguments import LOST as TRAINER_LOST
from stoker.job.importers.trainer_arguments import TrainerDefaults, read_model, read_trainer_arguments

PEFT_TARGETS = (
    "TRL leaves them to peft, which takes them by the model's kind: write [q_proj, v_proj] for the same in Llama, "
    "Mistral, Qwen"
)
FREE = {
    "Stoker tokenises ahead and in parallel by itself": "dataset_batch_size "
    "dataset_kwargs.* padding_free eval_packing max_seq_len_pad",
    "rows are always shuffled": "shuffle_dataset",
    "causal language models, always": "lora_task_type",
    "double quantisation and nf4 are what 4 bits mean here": "use_bnb_nested_quant bnb_4bit_quant_type "
    "bnb_4bit_quant_storage bnb_4bit_compute_dtype",
    "the weights' own precision when they are loaded; `precision` says how is computed": "dtype torch_dtype",
    "set by the launcher": "config env.* ignore_bias_buffers accelerate_config num_processes",
    "padding never counts": "pad_token",
    "an evaluation's split is named in its own source": "dataset_test_split",
    "idle: for another task": "loss_weights max_prompt_length max_completion_length "
    "num_generations "
    "temperature top_p top_k use_vllm vllm_mode vllm_gpu_memory_utilization reward_model_name_or_path reward_funcs "
    "ref_model_mixup_alpha ref_model_sync_steps sync_ref_model",
    "no effect without `dataset_name`": "dataset_config dataset_train_split",
}
LOST = {
    "the model's code and loading stay as transformers has them": "model_init_kwargs.*",
    "Stoker streams local files by their size": "streaming dataset_streaming",
}


KEYS = AdapterKeys(
    rank="lora_r",
    rslora="use_rslora",
    dora="use_dora",
    targets="lora_target_modules",
    every="all-linear",
    modules="lora_modules_to_save",
    parameters="lora_target_parameters",
    others="load_in_4bit load_in_8bit",
    defaults=(16, 32.0, 0.05),
)


def read_trl(document: JobDocument) -> ConfigReader:
    """Reads a file of ``trl sft --config``, or a command line; other trainers of TRL are refused by name."""
    config = ConfigReader(document, "TRL")
    trainer = "sft"
    if config.value(SUBCOMMAND) is not None:
        trainer = str(config.value(SUBCOMMAND))
        task_of(config, SUBCOMMAND, trainer)
    else:
        trainer = _task_by_keys(config)
    if trainer == "sft":
        config.drop(
            "loss_type", "the loss is plain cross entropy", matters=config.text("loss_type") not in ("nll", None)
        )
    if trainer == "grpo":
        trl_grpo(config, kl=0.0, loss="dapo")
    trl_preferences(config, trainer)
    read_model(config)
    config.drop("model_init_kwargs.attn_implementation", "Stoker uses PyTorch's attention")
    config.take("router_aux_loss_coef", "train.router_aux_loss")
    _tuning(config)
    old = config.value("max_length") is None and config.value("max_seq_length") is not None
    config.take("max_seq_length" if old else "max_length", "train.seq_len", 1024)
    config.take("packing", "train.pack", False)
    best_fit = config.text("packing_strategy") == "bfd"
    config.drop("packing_strategy", "whole documents, best fit decreasing", matters=not best_fit)
    carry_stop(config, "eos_token")
    _data(config, _loss(config) if trainer == "sft" else ForeignSource())
    read_trainer_arguments(config, TrainerDefaults(lr=RATES.get(trainer, 2e-5), recompute=True, precision="bf16"))
    config.sweep([FREE, TRAINER_FREE], [LOST, TRAINER_LOST])
    return config


# Keys that only another trainer than SFT's has.
TASK_KEYS = {
    "grpo": "num_generations max_completion_length reward_funcs vllm_mode use_vllm",
    "dpo": "ref_model_mixup_alpha precompute_ref_log_probs max_prompt_length rpo_alpha sync_ref_model beta",
    "reward": "center_rewards_coefficient",
    "kto": "desirable_weight undesirable_weight",
}


RATES = {"grpo": 1e-6, "dpo": 1e-6, "kto": 1e-6, "reward": 1e-4}  # by trainer


def _task_by_keys(config: ConfigReader) -> str:
    for task, keys in TASK_KEYS.items():
        if written := [key for key in keys.split() if key in config.document.data]:
            task_of(config, written[0], task)
            return task
    config.default("task", "sft", "the file does not name its trainer")
    return "sft"


def _tuning(config: ConfigReader) -> None:
    peft, four, eight = config.flag("use_peft"), config.flag("load_in_4bit"), config.flag("load_in_8bit")
    if not peft:
        if peft is not None:
            config.carry("use_peft", "tune.method", "full")
        else:
            config.default("tune.method", "full")
        config.idle("idle: use_peft is off", *KEYS.all)
        return
    config.carry("use_peft", "tune.method", "qlora" if four else "lora")
    carry_bits(config, four=four, eight=eight)
    read_adapter(config, KEYS, default=PEFT_TARGETS)


def _data(config: ConfigReader, common: ForeignSource) -> None:
    """Reads the data sets; ``common`` says which tokens are trained."""
    _shared_settings(config, common)
    mixture = config.value("datasets")
    if isinstance(mixture, list) and mixture:
        config.idle("`datasets` wins, there as here", "dataset_name", "dataset_config")
        for index, entry in enumerate(mixture):
            _mixture_entry(config, index, entry, common)
    elif name := config.text("dataset_name"):
        replace(common, path=local(name, config.document.file)).carry(config, "dataset_name", "data[0]")
        config.take("dataset_train_split", "data[0].split")
        config.drop("dataset_config", SUBSET, matters=True)
    config.idle("`text` is the default", "dataset_text_field")
    _held_out(config, common)
    mode = config.text("truncation_mode")
    config.drop("truncation_mode", "a row that is too long keeps its beginning", matters=mode != "keep_start")


def _shared_settings(config: ConfigReader, common: ForeignSource) -> None:
    """Reads the settings that apply to all data sets of the file."""
    common.take_arguments(config)
    template, column = config.text("chat_template_path"), config.text("dataset_text_field")
    if template is not None and template.endswith((".jinja", ".jinja2")):
        common.template = local(template, config.document.file)
        common.keys["template"] = "chat_template_path"
    elif template is not None:
        config.drop("chat_template_path", "a tokenizer's folder: write its template to a .jinja file", matters=True)
    if column not in (None, "text"):
        common.columns, common.keys["columns"] = {"text": str(column)}, "dataset_text_field"


def _mixture_entry(config: ConfigReader, index: int, entry: Any, common: ForeignSource) -> None:
    source, home = config.block(("datasets", index)), f"data[{index}]"
    if not isinstance(entry, dict) or not entry.get("path"):
        config.problem(source.within, f"`datasets[{index}]` names no path", "write `path: org/name`")
        return
    path, files = str(entry["path"]), data_files(entry.get("data_files"))
    if path in LOADERS and files:
        path = take_first(source, files)
    elif files:
        source.drop("data_files", "a hub data set is read by its splits: `split`", matters=True)
    replace(common, path=local(path, config.document.file)).carry(config, source.path("path"), home)
    if entry.get("split") is not None:
        source.carry("split", f"{home}.split", str(entry["split"]))
    if entry.get("fraction") is not None:
        note = "Stoker may repeat a source; TRL cuts them all"
        source.carry("fraction", f"{home}.weight", source.number("fraction"), note)
    source.drop_listed({"Stoker takes the columns it needs": "columns"}, {SUBSET: "name data_dir"})


def _held_out(config: ConfigReader, common: ForeignSource) -> None:
    strategy = config.text("eval_strategy") or "no"
    if config.number("test_split_size"):
        carry_share(config, "test_split_size")
    elif strategy in ("steps", "epoch") and (name := config.text("dataset_name")):
        split = config.text("dataset_test_split") or "test"
        config.carry("eval_strategy", "evaluate.data[0].path", local(name, config.document.file), "TRL's test split")
        config.also("evaluate.data[0].split", split)
        if common.train_on is not None:
            config.also("evaluate.data[0].train_on", common.train_on, "as in training")
    else:
        config.default("evaluate.fraction", 0.0)


def _loss(config: ConfigReader) -> ForeignSource:
    """Reads which tokens SFT trains, for all data sets."""
    found = ForeignSource()
    assistant, completion = config.flag("assistant_only_loss"), config.flag("completion_only_loss")
    for key, value in (("assistant_only_loss", assistant), ("completion_only_loss", completion)):
        if value:
            config.drop(key, "only answers are trained, by default")
    if assistant or completion:
        config.idle("the other key says it", "assistant_only_loss", "completion_only_loss")
        return found
    found.train_on = "everything"
    for key in ("completion_only_loss", "assistant_only_loss"):
        if config.value(key) is not None and "train_on" not in found.keys:
            found.keys["train_on"] = key
        else:
            config.drop(key, "`train_on`")
    if completion is None:
        found.notes["train_on"] = "TRL trains conversations whole; rows of prompt and completion: write all"
    return found
