"""The keys of preference learning: TRL's DPO, KTO and reward trainers, LLaMA-Factory's stages dpo, kto and rm."""

from __future__ import annotations

from stoker.job.importers.config_reader import ConfigReader
from stoker.job.importers.foreign_names import options_of

OTHER_TASK = "idle: for another task"
FACTORY = "pref_beta pref_ftx pref_loss dpo_label_smoothing kto_chosen_weight kto_rejected_weight simpo_gamma ref_model"
TRL = (
    "beta loss_type label_smoothing rpo_alpha precompute_ref_log_probs desirable_weight undesirable_weight "
    "center_rewards_coefficient"
)


def factory_preferences(config: ConfigReader, stage: str) -> None:
    """Carries the keys of LLaMA-Factory's stage ``dpo``, ``kto`` or ``rm``; the other keys of preferences are idle."""
    loss = "kto"
    if stage == "dpo":
        loss = _loss(config, "pref_loss", config.text("pref_loss") or "sigmoid")
    if stage in ("dpo", "kto"):
        config.take("pref_beta", "dpo.beta", 0.1)
        config.take("ref_model", "dpo.reference")
    if stage == "dpo":
        config.take("pref_ftx", "dpo.sft_weight")
        if loss == "sigmoid":
            config.take("dpo_label_smoothing", "dpo.label_smoothing")
        if loss == "simpo":
            config.take("simpo_gamma", "dpo.margin", 0.5)
        _lose(config, "the losses have no such term", "pref_bco_weight", "ld_alpha")
    if stage in ("dpo", "kto"):
        why = "the reference is a whole model: merge the adapter first, or quantise with `model.quantise`"
        _lose(config, why, "ref_model_adapters", "ref_model_quantization_bit")
    if stage == "kto":
        config.take_all(("kto_chosen_weight", "dpo.good_weight"), ("kto_rejected_weight", "dpo.bad_weight"))
    config.idle(OTHER_TASK, *FACTORY.split())


def trl_preferences(config: ConfigReader, trainer: str) -> None:
    """Carries the keys of TRL's trainer ``dpo``, ``kto`` or ``reward``; the other keys of preferences are idle."""
    if trainer == "dpo":
        words = config.words("loss_type") or ["sigmoid"]
        if len(words) > 1:
            config.problem("loss_type", "Stoker takes one loss of pairs, and `sft_weight` beside it", "write one")
        loss = _loss(config, "loss_type", words[0])
        config.take("beta", "dpo.beta", 0.1)
        config.take("rpo_alpha", "dpo.sft_weight")
        if loss == "robust":
            config.take("label_smoothing", "dpo.label_smoothing")
    if trainer in ("dpo", "kto"):
        _lose(config, "the reference stays as it is at the start", "sync_ref_model")
        whole = "`train.seq_len` limits a prompt and its answer together"
        _lose(config, whole, "max_prompt_length", "max_completion_length")
    if trainer == "kto":
        config.take("beta", "dpo.beta", 0.1)
        config.take_all(("desirable_weight", "dpo.good_weight"), ("undesirable_weight", "dpo.bad_weight"))
        if config.text("loss_type") not in (None, "kto"):
            config.problem("loss_type", "Stoker has KTO's own loss of judged answers", "write kto")
        config.idle("the loss of `kto`", "loss_type")
    if trainer in ("dpo", "kto"):
        off = "off: Stoker takes the model without its adapter, where it has one"
        config.switch("precompute_ref_log_probs", "dpo.reference", "precomputed", off=off)
    if trainer == "reward":
        config.take("center_rewards_coefficient", "reward.center")
    config.idle("dropout is off here", "disable_dropout")
    config.idle(OTHER_TASK, *TRL.split())


def _lose(config: ConfigReader, why: str, *keys: str) -> None:
    """Drops keys that change the training where they are set."""
    for key in keys:
        config.drop(key, why, matters=bool(config.value(key)))


def _loss(config: ConfigReader, key: str, word: str) -> str:
    """Carries the loss of pairs, whose names are the tools'."""
    losses = [loss for loss in options_of("dpo.loss") if loss != "kto"]
    if word not in losses:
        config.problem(key, f"Stoker has no loss of pairs `{word}` yet", f"it has {', '.join(losses)}")
    elif config.value(key) is None:
        config.default("dpo.loss", word)
    else:
        config.carry(key, "dpo.loss", word)
    return word
