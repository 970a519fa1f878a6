"""LLaMA-Factory's files: its own keys, its register of data sets, wrong values at their places."""

from __future__ import annotations

from pathlib import Path

import pytest
from foreign import LLAMA_FACTORY, checked, lost, why, written

from stoker.errors import UserError
from stoker.job.importers import import_files


def test_llama_factory_s_values_and_defaults() -> None:
    imported = import_files([written(LLAMA_FACTORY)])
    job = checked(imported).job
    assert job.model is not None
    assert (job.task, job.model.name) == ("sft", "org/base-4b")
    assert (job.tune.method, job.tune.rank, job.tune.alpha, job.tune.targets) == ("lora", 8, 16, "all-linear")
    assert (job.train.lr, job.train.micro_batch, job.train.accumulation, job.train.batch) == (1e-4, 1, 8, 8)
    assert (job.train.schedule, job.train.warmup, job.train.weight_decay) == ("cosine", 0.1, 0.0)
    assert (job.epochs, job.seed, job.evaluate.fraction, job.parallel.recompute) == (3.0, 42, 0.0, "full")
    assert [source.path for source in job.data] == ["data/identity.json", "data/demo.json"]
    assert job.data[1].columns == {"instruction": "frage", "output": "antwort"}
    assert job.data[0].split == "[:1000]"
    assert "# LLaMA-Factory's default; twice the rank" in imported.text
    assert "the tokenizer's own takes the place of `qwen3`" in imported.text


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("use_unsloth_gc: true\n", ("full", "activations")),
        ("use_unsloth_gc: false\n", ("full", "none")),
        ("use_unsloth_gc: true\ndisable_gradient_checkpointing: true\n", ("none", "none")),
    ],
)
def test_unsloths_checkpoints_are_recomputed_and_offloaded(lines: str, expected: tuple[str, str]) -> None:
    parallel = checked(import_files([written(LLAMA_FACTORY + lines)])).job.parallel
    assert (parallel.recompute, parallel.offload) == expected


@pytest.mark.parametrize(
    ("name", "format", "columns"),
    [
        ("tools", "sharegpt", {"conversations": "talk"}), ("chat", "messages", {}), ("identity", "instruction", {}),
    ],
)  # fmt: skip
def test_the_register_tells_the_format(name: str, format: str, columns: dict[str, str]) -> None:
    source = checked(import_files([written(LLAMA_FACTORY, dataset=name)])).job.data[0]
    assert (source.format, source.columns) == (format, columns)


def test_pre_training_reads_one_column_as_text_and_packs() -> None:
    imported = import_files([written(LLAMA_FACTORY, stage="pt", dataset="corpus,wiki")])
    job = checked(imported).job
    assert (job.task, job.train.pack) == ("pretrain", True)
    assert [(s.path, s.format, s.columns) for s in job.data] == [
        ("data/corpus.jsonl", "text", {}),
        ("org/wiki", "text", {"text": "content"}),
    ]
    assert lost(imported) == {"wiki.subset"}
    assert why(imported, "template") == "no effect beside the other keys"


def test_training_from_scratch_begins_with_random_weights() -> None:
    job = checked(import_files([written(LLAMA_FACTORY + "train_from_scratch: true\n", finetuning_type="full")])).job
    assert job.model is not None and (job.model.weights, job.tune.method) == ("random", "full")


def test_quantised_bases() -> None:
    four = import_files([written(LLAMA_FACTORY, quantization_bit="4")])
    assert checked(four).job.tune.method == "qlora"
    eight = checked(import_files([written(LLAMA_FACTORY, quantization_bit="8")])).job
    assert eight.model is not None
    assert (eight.tune.method, eight.model.quantise) == ("lora", "8bit")
    with pytest.raises(UserError, match="to 4 or 8 bits, not 2"):
        import_files([written(LLAMA_FACTORY, quantization_bit="2")])


def test_preferences() -> None:
    more = {"pref_beta": "0.2", "pref_loss": "simpo", "simpo_gamma": "0.7", "pref_ftx": "0.1"}
    lines = "".join(f"{key}: {value}\n" for key, value in more.items())
    job = checked(import_files([written(LLAMA_FACTORY + lines, stage="dpo")])).job
    block = job.dpo  # type: ignore[attr-defined]
    assert (job.task, block.loss, block.beta, block.margin, block.sft_weight) == ("dpo", "simpo", 0.2, 0.7, 0.1)
    assert block.reference == "none"
    job = checked(import_files([written(LLAMA_FACTORY + "kto_rejected_weight: 2.0\n", stage="kto")])).job
    block = job.dpo  # type: ignore[attr-defined]
    assert (block.loss, block.beta, block.bad_weight) == ("kto", 0.1, 2.0)
    assert checked(import_files([written(LLAMA_FACTORY, stage="rm")])).job.task == "reward"
    with pytest.raises(UserError, match="no loss of pairs `kto_pair` yet"):
        import_files([written(LLAMA_FACTORY + "pref_loss: kto_pair\n", stage="dpo")])


@pytest.mark.parametrize("stage", ["rloo"])
def test_tasks_to_come_are_refused_at_their_place(stage: str) -> None:
    given = written(LLAMA_FACTORY, stage=stage)
    line = Path(given).read_text().splitlines().index(f"stage: {stage}") + 1
    with pytest.raises(UserError) as refused:
        import_files([given])
    (problem,) = refused.value.problems
    assert (problem.file, problem.line, problem.column) == (given, line, 8)
    assert problem.message == f"Stoker cannot train `{stage}` yet"
    assert "sft" in problem.suggestion


def test_wrong_values_are_told_all_at_once_with_their_places() -> None:
    given = written(LLAMA_FACTORY, learning_rate="1e-4x", num_train_epochs="[1]", bf16="maybe", lora_rank="0")
    with pytest.raises(UserError) as refused:
        import_files([given])
    assert [problem.message for problem in refused.value.problems] == [
        "`learning_rate` must be a number, not '1e-4x'",
        "`num_train_epochs` must be a number, not a list",
        "`bf16` must be true or false, not 'maybe'",
    ]
    assert all(problem.file == given and problem.line and problem.column for problem in refused.value.problems)
    with pytest.raises(UserError, match=r"given.yaml:\d+:12: `lora_rank`: .* whole number above 0"):
        import_files([written(LLAMA_FACTORY, lora_rank="0")])
    with pytest.raises(UserError, match=r"`idendity` is not in data/dataset_info.json; did you mean identity"):
        import_files([written(LLAMA_FACTORY, dataset="idendity")])
    Path("data/dataset_info.json").unlink()
    with pytest.raises(UserError, match=r"dataset_info.json, which is not found; name it: `--data-info"):
        import_files([written(LLAMA_FACTORY)])


def test_unknown_keys_are_listed_with_the_nearest() -> None:
    (unknown,) = import_files([written(LLAMA_FACTORY, lerning_rate="1")]).unknown
    assert (unknown.key, unknown.near, unknown.where) == ("lerning_rate", "learning_rate", "given.yaml:26:15")


def test_numbers_that_yaml_1_1_reads_as_text_and_its_words_for_truth() -> None:
    job = checked(import_files([written(LLAMA_FACTORY, learning_rate='"5e-6"', bf16="yes")])).job
    assert (job.train.lr, job.train.precision) == (5e-6, "bf16")


def test_llama_factory_s_lora_plus_and_additional_targets() -> None:
    more = "loraplus_lr_ratio: 16.0\nadditional_target: embed_tokens,lm_head\nlora_target: q_proj,v_proj\n"
    imported = import_files([written(LLAMA_FACTORY.replace("lora_target: all\n", more))])
    tune = checked(imported).job.tune
    assert (tune.loraplus_ratio, tune.modules_to_save) == (16.0, ["embed_tokens", "lm_head"])
    assert tune.targets == ["q_proj", "v_proj"] and lost(imported) == set()
    full = import_files([written(LLAMA_FACTORY.replace("lora_target: all\n", more), finetuning_type="full")])
    assert checked(full).job.tune.method == "full"
    assert why(full, "additional_target") == "idle: finetuning_type is not lora" and lost(full) == set()


def test_tokens_and_what_is_trained() -> None:
    more = "add_tokens: <a>,<b>\nadd_special_tokens: <c>\nresize_vocab: true\ntrain_on_prompt: true\n"
    more += "enable_thinking: false\ndefault_system: Be kind.\n"
    imported = import_files([written(LLAMA_FACTORY + more)])
    job = checked(imported).job
    assert job.model is not None and job.model.special_tokens is not None
    assert job.model.special_tokens.additional == ["<a>", "<b>", "<c>"]
    assert {(s.train_on, s.special_tokens) for s in job.data} == {("everything", "keep")}
    assert job.data[0].template_arguments == {"enable_thinking": False}
    assert lost(imported) == {"default_system"}
    job = checked(import_files([written(LLAMA_FACTORY + "split_special_tokens: true\n", template="chatml")])).job
    assert job.model is not None and job.model.stop == "<|im_end|>" and job.data[0].special_tokens == "text"
    Path("tokens.yaml").write_text("<x>: what begins\n<y>: what ends\n")
    job = checked(import_files([written(LLAMA_FACTORY + "new_special_tokens_config: tokens.yaml\n")])).job
    assert job.model is not None and job.model.special_tokens is not None
    assert job.model.special_tokens.additional == ["<x>", "<y>"]


def test_answers_by_rewards() -> None:
    lines = "ppo_epochs: 2\nppo_target: 4.0\nppo_buffer_size: 2\nmax_new_tokens: 64\ntemperature: 0.9\n"
    lines += "reward_model: org/reward\ntop_p: 0.9\nmax_steps: 10\n"
    imported = import_files([written(LLAMA_FACTORY + lines, stage="ppo", num_train_epochs="")], processes=1)
    job = checked(imported).job
    block = job.ppo  # type: ignore[attr-defined]
    assert (job.task, block.epochs, block.kl_target, block.max_tokens, block.temperature) == ("ppo", 2, 4.0, 64, 0.9)
    assert block.prompts == 2 * job.train.batch and (block.kl, block.rewards) == (0.2, ["exact"])
    assert {"reward_model", "top_p"} <= lost(imported)


def test_keys_of_preferences_without_counterpart_are_lost() -> None:
    keys = {"pref_bco_weight": "0.5", "ld_alpha": "0.8", "ref_model_adapters": "org/adapter"}
    lines = "".join(f"{key}: {value}\n" for key, value in keys.items())
    before = lost(import_files([written(LLAMA_FACTORY, stage="dpo")]))
    imported = import_files([written(LLAMA_FACTORY + lines, stage="dpo")])
    assert lost(imported) - before == set(keys)
    model = checked(imported).job.model
    assert model is not None and model.quantise == "none"
    assert "quantise with `model.quantise`" in why(imported, "ref_model_adapters")
