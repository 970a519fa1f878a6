"""The keys of reinforcement learning: TRL's GRPO trainer, Axolotl's ``rl: grpo``, LLaMA-Factory's ``stage: ppo``."""

from __future__ import annotations

from stoker.job.importers.config_reader import ConfigReader
from stoker.job.keys.key_paths import KeyPath

OTHER_SAMPLING = (
    "answers are drawn from the policy's whole distribution: an answer by other odds is not the policy's own"
)
NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
FREE = (
    "use_vllm vllm_mode vllm_gpu_memory_utilization vllm_tensor_parallel_size vllm_server_host vllm_server_port "
    "vllm_server_timeout vllm_enable_sleep_mode vllm_max_model_length use_transformers_paged cache_implementation "
    "ds3_gather_for_generation log_completions num_completions_to_print shuffle_dataset disable_dropout use_liger_loss "
    "num_generations_eval"
)
LOST = {
    "the reference is the model at its start": "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps",
    "all tokens of an answer are trained": "top_entropy_quantile",
    "prompts are not cut: those that leave no room for an answer are refused": "max_prompt_length",
}
# TRL's losses: Stoker's, and how they differ.
LOSSES = {
    "grpo": ("grpo", ""),
    "dr_grpo": ("dr_grpo", ""),
    "dapo": ("dapo", ""),
    "bnpo": ("dapo", "tokens weigh alike over the whole step, not within a process's batch"),
}


def trl_grpo(config: ConfigReader, block: KeyPath = (), *, kl: float, loss: str) -> None:
    """Carries the keys of TRL's GRPO trainer.

    Args:
        block: the block that the keys are in, ``trl`` in Axolotl's files.
        kl: the tool's default of ``beta``.
        loss: the tool's default of ``loss_type``.
    """
    keys = config.block(block)
    answers = int(keys.take("num_generations", "grpo.answers", 8) or 8)
    keys.take("max_completion_length", "grpo.max_tokens", 512)
    keys.take("entropy_coef", "grpo.entropy")
    keys.take("num_iterations", "grpo.epochs")
    keys.take("temperature", "grpo.temperature")
    if keys.take("beta", "grpo.kl", kl):
        config.default("grpo.kl_in", "loss")
        config.default("grpo.kl_estimator", "k3")
    below = keys.take("epsilon", "grpo.clip", 0.2)
    if keys.take("epsilon_high", "grpo.clip_high") is None:
        config.default("grpo.clip_high", float(below or 0.2), "as below 1")
    keys.take("delta", "grpo.dual_clip")
    keys.take("mask_truncated_completions", "grpo.mask_truncated")
    config.default("grpo.dynamic", 1, "no prompt is replaced there")
    _loss(keys, loss)
    _rewards(keys)
    _prompts(config, keys, answers)
    for key, neutral in NEUTRAL.items():
        value = keys.number(key)
        keys.drop(key, OTHER_SAMPLING, matters=value not in (None, neutral, -1))
    for why, names in LOST.items():
        for key in names.split():
            keys.drop(key, why, matters=keys.value(key) not in (None, False))
    keys.idle("Stoker's own engine answers, with the weights in training", *FREE.split())


def _loss(keys: ConfigReader, default: str) -> None:
    key, level = "loss_type", "importance_sampling_level"
    word = keys.text(key) or default
    scaled = str(keys.value("scale_rewards")).lower()
    if word not in LOSSES:
        keys.problem(key, f"Stoker has no loss of groups `{word}` yet", f"it has {', '.join(LOSSES)}")
        return
    loss, note = LOSSES[word]
    if keys.text(level) == "sequence":
        keys.carry(level, "grpo.loss", "gspo", "one ratio for an answer; answers weigh alike")
        keys.drop(key, "`loss: gspo` says it", matters=word != "grpo")
    elif keys.value(key) is None:
        keys.default("grpo.loss", loss, note)
    else:
        keys.carry(key, "grpo.loss", loss, note)
    keys.idle("each token has its own ratio", level)
    divides = keys.value("scale_rewards") is None or scaled in ("true", "group")
    differs = scaled == "batch" or divides != (loss != "dr_grpo")
    if differs and keys.value("scale_rewards") is None:
        keys.default("grpo.loss", loss, "TRL divides scores by the deviation of their group, this loss does not")
    why = "`dr_grpo` divides scores by nothing, the others by the deviation of their group"
    keys.drop("scale_rewards", why, matters=differs)


def _rewards(keys: ConfigReader) -> None:
    key, weights_key = "reward_funcs", "reward_weights"
    names, weights = keys.words(key), keys.value(weights_key)
    if not names:
        keys.default("grpo.rewards", ["exact"], "the file names no reward: write your own")
        keys.drop(weights_key, "of rewards that the file does not name", matters=True)
        return
    found: list[str] = []
    for name in names:
        if "/" in name:
            keys.problem(key, f"Stoker cannot take the model {name} for a reward", "name a function: module.function")
            return
        module, _, function = name.rpartition(".")
        found.append(f"python:{module or 'trl.rewards'}:{function}")
    rewards: list[str] | dict[str, float] = found
    if isinstance(weights, list) and len(weights) == len(found):
        rewards = {name: float(weight) for name, weight in zip(found, weights, strict=True)}
        keys.idle("beside each reward", weights_key)
    keys.carry(key, "grpo.rewards", rewards, "called with prompts and completions, as TRL does")


def _prompts(config: ConfigReader, keys: ConfigReader, answers: int) -> None:
    """Carries the number of prompts per generation batch: TRL counts answers, of all processes or of one."""
    whole, each = keys.whole("generation_batch_size"), keys.whole("steps_per_generation")
    batch = config.whole("per_device_train_batch_size") or config.whole("micro_batch_size") or 8
    steps = each or config.whole("gradient_accumulation_steps") or 1
    note = "" if whole or config.processes == 1 else "of one process: multiply by the number of processes"
    if (count := whole or batch * steps) % answers:
        key = "generation_batch_size" if whole else "num_generations"
        keys.problem(key, f"{count} answers are not a whole number of groups of {answers}", "TRL refuses it, too")
    elif whole:
        keys.carry("generation_batch_size", "grpo.prompts", count // answers)
    elif each:
        keys.carry("steps_per_generation", "grpo.prompts", count // answers, note)
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
    config.default("ppo.rewards", ["exact"], "or `ppo.reward`: a run of task reward, or a sequence classifier")
    for key in ("reward_model", "reward_model_adapters", "reward_model_quantization_bit", "reward_model_type"):
        config.drop(key, "Stoker's rewards are functions and scorers: write `rewards`", matters=True)
