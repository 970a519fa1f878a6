"""TRL's files and command lines."""

from __future__ import annotations

import pytest
from foreign import TRL, checked, lost, written

from stoker.errors import UserError
from stoker.job.importers import import_files


def test_trl_s_values_and_defaults() -> None:
    imported = import_files([written(TRL)])
    job = checked(imported).job
    assert (job.task, job.tune.method, job.tune.rank, job.tune.alpha, job.tune.dropout) == ("sft", "lora", 32, 16, 0.05)
    assert (job.train.lr, job.train.schedule, job.train.warmup, job.train.seq_len) == (2e-4, "linear", 0, 1024)
    assert (job.train.precision, job.parallel.recompute, job.train.pack) == ("bf16", "full", True)
    assert (job.evaluate.data[0].path, job.evaluate.data[0].split, job.evaluate.every) == ("org/capybara", "test", 100)
    assert "write [q_proj, v_proj]" in " ".join(imported.text.split())
    assert lost(imported) == set()
    reported = [item.key for item in import_files([written(TRL + "loss_type: nll\n")]).dropped]
    assert reported.count("loss_type") == 1
    assert {source.train_on for source in (*job.data, *job.evaluate.data)} == {"all"}
    plain = checked(import_files([written(TRL, assistant_only_loss="")])).job
    assert {source.train_on for source in (*plain.data, *plain.evaluate.data)} == {"everything"}


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
    with pytest.raises(UserError, match=r"run.sh:1:1: Stoker cannot train `rloo` yet"):
        import_files([written("trl rloo --model_name_or_path m --dataset_name d", "run.sh")])
    with pytest.raises(UserError, match=r"run.sh:1:\d+: `learning_rate` must be a number"):
        import_files([written("trl sft --learning_rate fast", "run.sh")])


@pytest.mark.parametrize(("strategy", "missing"), [("bfd", set()), ("wrapped", {"packing_strategy"})])
def test_trl_s_packing_is_the_same_if_it_keeps_rows_whole(strategy: str, missing: set[str]) -> None:
    text = f"trl sft --model_name_or_path org/m --dataset_name org/d --packing --packing_strategy {strategy}"
    assert lost(import_files([written(text, "run.sh")])) == missing


def test_trl_s_preferences() -> None:
    text = "trl dpo --model_name_or_path org/m --dataset_name org/d "
    asked = "--beta 0.2 --loss_type robust --label_smoothing 0.1 --rpo_alpha 0.5 --precompute_ref_log_probs true"
    job = checked(import_files([written(text + asked, "run.sh")])).job
    block = job.dpo  # type: ignore[attr-defined]
    assert (job.task, job.train.lr, block.loss, block.beta, block.label_smoothing) == ("dpo", 1e-6, "robust", 0.2, 0.1)
    assert (block.sft_weight, block.reference) == (0.5, "precomputed")
    kto = "trl kto --model_name_or_path org/m --dataset_name org/d --desirable_weight 1.5"
    job = checked(import_files([written(kto, "run.sh")])).job
    assert (job.task, job.dpo.loss, job.dpo.good_weight) == ("dpo", "kto", 1.5)  # type: ignore[attr-defined]
    reward = "trl reward --model_name_or_path org/m --dataset_name org/d --center_rewards_coefficient 0.01"
    job = checked(import_files([written(reward, "run.sh")])).job
    assert (job.task, job.train.lr, job.reward.center) == ("reward", 1e-4, 0.01)  # type: ignore[attr-defined]
    assert job.data[0].train_on == "all"  # conversations are trained whole by TRL's SFT alone
    with pytest.raises(UserError, match="no loss of pairs `aot` yet"):
        import_files([written(text + "--loss_type aot", "run.sh")])


def test_trl_s_modules_trained_whole_and_expert_parameters() -> None:
    more = "lora_modules_to_save: [lm_head]\nlora_target_parameters: [mlp.experts.gate_up_proj]\n"
    imported = import_files([written(TRL + more)])
    tune = checked(imported).job.tune
    assert (tune.modules_to_save, tune.targets) == (["lm_head"], ["mlp.experts.gate_up_proj"])
    assert lost(imported) == set()
    both = import_files([written(TRL + more + "lora_target_modules: all-linear\n")])
    assert checked(both).job.tune.targets == "all-linear" and lost(both) == {"lora_target_parameters"}


def test_trl_s_stop_token_and_trained_turns() -> None:
    def read(more: str, assistant: str = ""):  # type: ignore[no-untyped-def]
        imported = import_files([written(TRL + more, assistant_only_loss=assistant)])
        return imported, checked(imported).job

    imported, job = read("eos_token: <|im_end|>\ncompletion_only_loss: true\ntruncation_mode: keep_start\n")
    assert job.model.stop == "<|im_end|>" and job.data[0].train_on == "all" and lost(imported) == set()
    imported, job = read("completion_only_loss: false\nloss_type: nll\n")
    assert job.data[0].train_on == "everything" and lost(imported) == set()
    imported, job = read("truncation_mode: keep_end\nchat_template_kwargs: {enable_thinking: false}\n", "true")
    assert lost(imported) == {"truncation_mode"} and job.data[0].template_arguments == {"enable_thinking": False}


def test_trl_s_groups_of_answers() -> None:
    text = "trl grpo --model_name_or_path org/m --dataset_name org/d --reward_funcs mine.rewards.good "
    asked = "--num_generations 4 --max_completion_length 64 --beta 0.04 --epsilon 0.1 --epsilon_high 0.3 "
    asked += "--num_iterations 2 --loss_type dr_grpo --scale_rewards none --temperature 0.9 --delta 4.0 "
    asked += "--per_device_train_batch_size 8 --gradient_accumulation_steps 2 --max_steps 40"
    imported = import_files([written(text + asked, "run.sh")], processes=1)
    job = checked(imported).job
    block = job.grpo  # type: ignore[attr-defined]
    assert (job.task, job.train.lr, job.steps, job.train.batch) == ("grpo", 1e-6, 40, 16)
    assert (block.loss, block.answers, block.prompts, block.max_tokens, block.epochs) == ("dr_grpo", 4, 4, 64, 2)
    assert (block.kl, block.kl_in, block.kl_estimator) == (0.04, "loss", "k3")
    assert (block.clip, block.clip_high, block.dual_clip, block.temperature) == (0.1, 0.3, 4.0, 0.9)
    assert block.rewards == ["python:mine.rewards:good"] and block.dynamic == 1
    assert lost(imported) == set()


def test_trl_s_defaults_of_groups_and_what_has_no_counterpart() -> None:
    text = "model_name_or_path: org/m\ndataset_name: org/d\nnum_generations: 8\nmax_steps: 5\ntop_p: 0.9\n"
    text += "reward_funcs: [accuracy_reward, mine.short]\nreward_weights: [1.0, 0.5]\n"
    text += "mask_truncated_completions: true\n"
    imported = import_files([written(text)], processes=1)
    block = checked(imported).job.grpo  # type: ignore[attr-defined]
    assert (block.loss, block.kl, block.clip, block.clip_high, block.max_tokens) == ("dapo", 0.0, 0.2, 0.2, 512)
    assert list(block.rewards.items()) == [
        ("python:trl.rewards:accuracy_reward", 1.0),
        ("python:mine:short", 0.5),
    ]
    assert lost(imported) == {"top_p"} and block.mask_truncated
    sequence = text + "importance_sampling_level: sequence\nloss_type: grpo\n"
    block = checked(import_files([written(sequence)], processes=1)).job.grpo  # type: ignore[attr-defined]
    assert block.loss == "gspo"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("loss_type: cispo\n", "no loss of groups `cispo` yet"),
        ("reward_funcs: [org/reward-model]\n", "cannot take the model org/reward-model for a reward"),
        ("per_device_train_batch_size: 3\n", "3 answers are not a whole number of groups of 8"),
    ],
)
def test_trl_s_groups_that_cannot_be_carried(more: str, message: str) -> None:
    text = "model_name_or_path: org/m\ndataset_name: org/d\nnum_generations: 8\nmax_steps: 5\n"
    with pytest.raises(UserError, match=message):
        import_files([written(text + more)])


@pytest.mark.parametrize(
    ("lines", "momentum"),
    [("optim: sgd\n", 0.0), ("optim: sgd\noptim_args: momentum=0.8,nesterov=False\nadam_beta1: 0.7\n", 0.8)],
)
def test_sgd_has_the_momentum_of_the_trainer(lines: str, momentum: float) -> None:
    train = checked(import_files([written(TRL + lines)])).job.train
    assert (train.optimizer, train.beta1) == ("sgd", momentum)


@pytest.mark.parametrize("name", ["galore_adamw", "apollo_adamw", "grokadamw", "OptimizerNames.ADEMAMIX", "OneBitAdam"])
def test_other_optimizers_than_adam_are_lost_and_not_taken_for_it(name: str) -> None:
    imported = import_files([written(f"{TRL}optim: {name}\n")])
    assert "optim" in lost(imported) and checked(imported).job.train.optimizer == "adamw"


@pytest.mark.parametrize(
    "name", ["adamw_torch_fused", "paged_adamw_8bit", "adamw_bnb_8bit", "ao_adamw_fp8", "optimi_adamw", "FusedAdam"]
)
def test_names_of_adam_are_adamw(name: str) -> None:
    imported = import_files([written(f"{TRL}optim: {name}\n")])
    assert "optim" not in lost(imported) and checked(imported).job.train.optimizer == "adamw"


def test_keys_of_preferences_without_counterpart_are_lost() -> None:
    text = "trl dpo --model_name_or_path org/m --dataset_name org/d --sync_ref_model true --max_prompt_length 256"
    assert lost(import_files([written(text, "run.sh")])) == {"sync_ref_model", "max_prompt_length"}
    off = "trl dpo --model_name_or_path org/m --dataset_name org/d --sync_ref_model false"
    assert lost(import_files([written(off, "run.sh")])) == set()
