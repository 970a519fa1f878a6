"""The keys of reinforcement learning: TRL's GRPO trainer, Axolotl's ``rl: grpo``, LLaMA-Factory's ``stage: ppo``."""

from __future__ import annotations

from stoker.job.importers.config_reader import ConfigReader

OTHER_SAMPLING = (
    "answers are drawn from the policy's whole distribution: an answer by other odds is not the policy's own"
)
NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
FREE = (
    *("use_vllm", "vllm_mode", "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_server_host"),
    *("vllm_server_port", "vllm_server_timeout", "vllm_enable_sleep_mode", "vllm_max_model_length"),
    *("use_transformers_paged", "cache_implementation", "ds3_gather_for_generation", "log_completions"),
    *("num_completions_to_print", "shuffle_dataset", "disable_dropout", "use_liger_loss", "num_generations_eval"),
)
LOST = {
    "the reference is the model at its start": ("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"),
    "all tokens of an answer are trained": ("top_entropy_quantile",),
    "prompts are not cut: those that leave no room for an answer are refused": ("max_prompt_length",),
}
# TRL's losses: Stoker's, and how they differ.
LOSSES = {
    "grpo": ("grpo", ""),
    "dr_grpo": ("dr_grpo", ""),
    "dapo": ("dapo", ""),
    "bnpo": ("dapo", "tokens weigh alike over the whole step, not within a process's batch"),
}


def trl_grpo(config: ConfigReader, prefix: str = "") -> None:
    """Carries the keys of TRL's GRPO trainer.

    Args:
        prefix: of the keys, ``trl.`` in Axolotl's files.
    """
    answers = int(config.take(f"{prefix}num_generations", "grpo.answers", 8) or 8)
    config.take(f"{prefix}max_completion_length", "grpo.max_tokens", 512)
    config.take(f"{prefix}entropy_coef", "grpo.entropy")
    config.take(f"{prefix}num_iterations", "grpo.epochs")
    config.take(f"{prefix}temperature", "grpo.temperature")
    if config.take(f"{prefix}beta", "grpo.kl", 0.0 if not prefix else 0.001):
        config.default("grpo.kl_in", "loss")
        config.default("grpo.kl_estimator", "k3")
    below = config.take(f"{prefix}epsilon", "grpo.clip", 0.2)
    if config.take(f"{prefix}epsilon_high", "grpo.clip_high") is None:
        config.default("grpo.clip_high", float(below or 0.2), "as below 1")
    config.take(f"{prefix}delta", "grpo.dual_clip")
    config.take(f"{prefix}mask_truncated_completions", "grpo.mask_truncated")
    config.default("grpo.dynamic", 1, "no prompt is replaced there")
    _loss(config, prefix)
    _rewards(config, prefix)
    _prompts(config, prefix, answers)
    for key, neutral in NEUTRAL.items():
        value = config.number(prefix + key)
        config.drop(prefix + key, OTHER_SAMPLING, matters=value not in (None, neutral, -1))
    for why, keys in LOST.items():
        for key in keys:
            config.drop(prefix + key, why, matters=config.value(prefix + key) not in (None, False))
    config.idle("Stoker's own engine answers, with the weights in training", *(prefix + key for key in FREE))


def _loss(config: ConfigReader, prefix: str) -> None:
    key, level = f"{prefix}loss_type", f"{prefix}importance_sampling_level"
    word = config.text(key) or ("dapo" if not prefix else "bnpo")
    scaled = str(config.value(f"{prefix}scale_rewards")).lower()
    if word not in LOSSES:
        config.problem(key, f"Stoker has no loss of groups `{word}` yet", f"it has {', '.join(LOSSES)}")
        return
    loss, note = LOSSES[word]
    if config.text(level) == "sequence":
        config.carry(level, "grpo.loss", "gspo", "one ratio for an answer; answers weigh alike")
        config.drop(key, "`loss: gspo` says it", matters=word != "grpo")
    elif config.value(key) is None:
        config.default("grpo.loss", loss, note)
    else:
        config.carry(key, "grpo.loss", loss, note)
    config.idle("each token has its own ratio", level)
    divides = config.value(f"{prefix}scale_rewards") is None or scaled in ("true", "group")
    differs = scaled == "batch" or divides != (loss != "dr_grpo")
    if differs and config.value(f"{prefix}scale_rewards") is None:
        config.default("grpo.loss", loss, "TRL divides scores by the deviation of their group, this loss does not")
    why = "`dr_grpo` divides scores by nothing, the others by the deviation of their group"
    config.drop(f"{prefix}scale_rewards", why, matters=differs)


def _rewards(config: ConfigReader, prefix: str) -> None:
    key, weights_key = f"{prefix}reward_funcs", f"{prefix}reward_weights"
    names, weights = config.words(key), config.value(weights_key)
    if not names:
        config.default("grpo.rewards", ["exact"], "the file names no reward: write your own")
        config.drop(weights_key, "of rewards that the file does not name", matters=True)
        return
    found: list[str] = []
    for name in names:
        if "/" in name:
            config.problem(key, f"Stoker cannot take the model {name} for a reward", "name a function: module.function")
            return
        module, _, function = name.rpartition(".")
        found.append(f"python:{module or 'trl.rewards'}:{function}")
    rewards: list[str] | dict[str, float] = found
    if isinstance(weights, list) and len(weights) == len(found):
        rewards = {name: float(weight) for name, weight in zip(found, weights, strict=True)}
        config.idle("beside each reward", weights_key)
    config.carry(key, "grpo.rewards", rewards, "called with prompts and completions, as TRL does")


def _prompts(config: ConfigReader, prefix: str, answers: int) -> None:
    """Carries the number of prompts per generation batch: TRL counts answers, of all processes or of one."""
    whole, each = config.whole(f"{prefix}generation_batch_size"), config.whole(f"{prefix}steps_per_generation")
    batch = config.whole("per_device_train_batch_size") or config.whole("micro_batch_size") or 8
    steps = each or config.whole("gradient_accumulation_steps") or 1
    note = "" if whole or config.processes == 1 else "of one process: multiply by the number of processes"
    if (count := whole or batch * steps) % answers:
        key = f"{prefix}generation_batch_size" if whole else f"{prefix}num_generations"
        config.problem(key, f"{count} answers are not a whole number of groups of {answers}", "TRL refuses it, too")
    elif whole:
        config.carry(f"{prefix}generation_batch_size", "grpo.prompts", count // answers)
    elif each:
        config.carry(f"{prefix}steps_per_generation", "grpo.prompts", count // answers, note)
    else:
        config.default("grpo.prompts", count // answers, note)


def factory_ppo(config: ConfigReader) -> None:
    """Carries the keys of LLaMA-Factory's stage ``ppo``; its clipping, gamma and lambda are Stoker's defaults."""
    batch = config.whole("per_device_train_batch_size") or 8
    steps = config.whole("gradient_accumulation_steps") or 1
    note = "answers of one process: multiply by the number of processes"
    buffer = config.whole("ppo_buffer_size")
    if buffer is None:
        config.default("ppo.prompts", batch * steps, note)
    else:
        config.carry("ppo_buffer_size", "ppo.prompts", batch * steps * buffer, note)
    config.take("ppo_epochs", "ppo.epochs", 4)
    config.take("ppo_target", "ppo.kl_target", 6.0)
    config.default("ppo.kl", 0.2, "where the adaptive factor begins")
    config.take("ppo_whiten_rewards", "ppo.whiten_rewards")
    config.take("max_new_tokens", "ppo.max_tokens", 1024)
    config.take("temperature", "ppo.temperature", 0.95)
    config.switch("ppo_score_norm", "ppo.whiten_rewards", True, "by the deviation of a round of answers")
    for key in ("top_p", "top_k"):
        value = config.number(key)
        config.drop(key, OTHER_SAMPLING, matters=value not in (None, NEUTRAL[key]))
    config.default("ppo.rewards", ["exact"], "Stoker takes no reward model here yet: write your rewards")
    for key in ("reward_model", "reward_model_adapters", "reward_model_quantization_bit", "reward_model_type"):
        config.drop(key, "Stoker's rewards are functions and scorers: write `rewards`", matters=True)
