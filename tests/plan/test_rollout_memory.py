"""Memory of a round of answers: caches as `stoker.generate` allocates them, and peaks of the allocator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from stoker.generate import decoder, generation_engine, page_pool, paged_cache, prefill, row_cache
from stoker.generate.decoder import decoder_of
from stoker.hardware.machines.cluster import cluster_of
from stoker.hardware.machines.cluster_file import load_cluster
from stoker.hardware.machines.device_names import device_kind
from stoker.hardware.process_device import Device
from stoker.job.layout import Layout
from stoker.job.rollout_sizes import RolloutSizes
from stoker.models.attention.paged_rows import PAGE
from stoker.plan.memory import rollout_memory
from stoker.plan.memory.delta_net_activations import most_of_rule
from stoker.plan.memory.memory_formulas import allocatable_bytes, stage_memory
from stoker.plan.memory.rollout_memory import rollout_parts
from stoker.plan.memory.stoker_memory import IDLE, REFERENCE, eager_parts
from stoker.plan.setting import Setting, TrainingWork
from stoker.plan.shape import Shape
from stoker.plan.shapes.shape_of_config import shape_of_config
from stoker.plan.software import STOKER
from stoker.train.preference import answer_scores

KEPT = tuple((torch.zeros(2, 5, 4), torch.zeros(2, 5, 4)) for _ in range(3))  # 3 layers, 2 heads, 5 tokens


def test_sizes_are_those_of_the_generation() -> None:
    assert (rollout_memory.PAGE, rollout_memory.SMALLEST, rollout_memory.GROWTH) == (
        PAGE,
        page_pool.SMALLEST,
        page_pool.GROWTH,
    )
    assert (rollout_memory.STEP, rollout_memory.SPARE) == (row_cache.STEP, row_cache.SPARE)
    assert (rollout_memory.PASS, rollout_memory.PIECE) == (prefill.PASS, generation_engine.PIECE)
    assert rollout_memory.OF_REWARD == answer_scores.TOKENS
    assert rollout_memory.SHARE_OF_CASTS == decoder.SHARE_OF_CASTS


@pytest.mark.parametrize(("needed", "largest"), [(1, 9999), (64, 9999), (65, 9999), (300, 9999), (300, 310)])
def test_the_pool_of_pages_grows_as_counted(needed: int, largest: int) -> None:
    pool = page_pool.PagePool(largest * PAGE * 3 * 2 * 2 * 4 * 4)
    pool.hold(KEPT)
    for _ in range(needed - 1):  # page 0 belongs to no row
        pool.take()
    assert pool.pages == rollout_memory._pool(needed, largest)[0]
    sizes = [size for size in (64, 256, 1024) if size < pool.pages]
    assert rollout_memory._pool(needed, largest)[1] == (sizes[-1] if sizes else 0)


@pytest.mark.parametrize(("prompt", "answer"), [(5, 40), (100, 60), (60, 400)])
def test_the_columns_of_rows_grow_as_counted(prompt: int, answer: int) -> None:
    cache = row_cache.RowCache(3)
    kept = tuple((torch.zeros(2, prompt, 4), torch.zeros(2, prompt, 4)) for _ in range(3))
    for _ in range(3):
        cache.add(kept)
    for _ in range(answer):
        cache.begin(1, torch.device("cpu"))
        cache.advance(1)
    columns = rollout_memory._columns(prompt, prompt + answer)
    assert cache.nbytes == 3 * 2 * rollout_memory._power_of_two(3) * 2 * columns * 4 * 4


def test_a_paged_cache_of_all_answers_has_the_counted_pages() -> None:
    pool = page_pool.PagePool(1 << 40)
    cache = paged_cache.PagedCache(3, pool)
    for _ in range(17):
        cache.add(tuple((torch.zeros(2, 300, 4), torch.zeros(2, 300, 4)) for _ in range(3)))
    for _ in range(200):
        cache.begin(1, torch.device("cpu"))
        cache.advance(1)
    assert pool.pages == rollout_memory._pool(1 + 17 * -(-500 // PAGE), 1 << 40)[0] == 256


LINEAR = {
    **{"model_type": "qwen3_next", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_experts": 0},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 4},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10},
}


def test_states_of_linear_attention_do_not_grow_with_the_answers() -> None:
    config = AutoConfig.for_model(**LINEAR, bos_token_id=0, eos_token_id=1, pad_token_id=0)
    decoder = decoder_of(AutoModelForCausalLM.from_config(config), Device("cpu", "fp32", "a test"), context=2048)
    shape, rows = shape_of_config(LINEAR), 3
    cache = decoder.new_rows()
    with decoder.at_work():
        cache.open([5] * rows, [None] * rows)
        decoder.preview(torch.zeros(rows, 5, dtype=torch.long), cache)
    held = rollout_memory._power_of_two(rows) * cache.state_bytes
    for tokens in (8, 800):
        sizes = RolloutSizes(1, rows, tokens, 1, 1)
        work = TrainingWork(shape, 5 + tokens, 8, precision="fp32", rollouts=sizes, prompt=5)
        setting = Setting(work, cluster_of(device_kind("cpu"), gpus=1, per_node=1), Layout(), 1)
        (sampling,) = moments_of(setting)["the sampling of answers"]
        columns = rollout_memory._columns(5, 5 + tokens)
        keys = rollout_memory._power_of_two(rows) * columns * 2 * shape.key_value_width * 4  # of one layer of four
        assert sampling["keys and values"] == held + keys


LLAMA: dict[str, Any] = {"model_type": "llama", "vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 5632, "tie_word_embeddings": False}


def moments_of(setting: Setting) -> dict[str, list[dict[str, float]]]:
    """Returns the components of each moment of a round."""
    found: dict[str, list[dict[str, float]]] = {}
    training, _ = eager_parts(setting, 0)
    for parts, moment in rollout_parts(setting, 0, training, capacity=allocatable_bytes(setting.cluster)):
        found.setdefault(moment, []).append(parts)
    return found


def policy(tuning: Any, sizes: RolloutSizes, *, shape: Shape | None = None, layout: Layout | None = None) -> Setting:
    """Returns a policy's setting on H200: rows of 256 tokens of a prompt and the answer, four in a micro-batch."""
    work = TrainingWork(
        shape or shape_of_config(LLAMA),
        256 + sizes.tokens,
        8,
        tuning=tuning,
        rollouts=sizes,
        scores=True,
        predicted=sizes.tokens,
        prompt=256,
    )
    layout = layout or Layout()
    return Setting(work, load_cluster(f"{layout.world}xH200"), layout, 4)


SIZES = RolloutSizes(4, 4, 256, 1, 2, reference=True)


def test_sampling_has_no_gradients_and_scoring_no_cache() -> None:
    setting = policy("full", SIZES)
    trained = 4 * setting.shape.parameters
    (sampling,) = moments_of(setting)["the sampling of answers"]
    old, reference = moments_of(setting)["the scoring of answers"]
    assert sampling["gradients"] == 0 and sampling["optimizer"] == 2 * trained
    assert sampling["keys and values"] == 256 * PAGE * 2 * 2 * (4 * 64) * 2  # a pool of 256 pages, two layers, 16 bits
    assert "keys and values" not in old and "keys and values" not in reference
    assert reference["replaced weights"] == trained and "replaced weights" not in old
    chunk = 4 * 4 * 256 * 32000
    assert old["head"] - reference["head"] == 0.5 * chunk  # the entropy
    casts = 2 * sum(m.parameters for i in range(2) for m in setting.shape.layer_matmuls(i))
    assert old["activations"] == reference["activations"] == casts


def test_adapters_are_switched_off_for_the_reference_and_nothing_is_replaced() -> None:
    setting = policy("lora", SIZES)
    assert all("replaced weights" not in parts for parts in moments_of(setting)["the scoring of answers"])
    assert REFERENCE not in stage_memory(setting, 0).parts
    assert moments_of(setting)["the scoring of answers"][0]["activations"] == 0  # nothing is cast


def test_the_weights_of_the_reference_are_on_the_host() -> None:
    setting = policy("full", SIZES)
    without = policy("full", replace(SIZES, reference=False))
    assert stage_memory(setting, 0).host - stage_memory(without, 0).host == 4 * setting.shape.parameters
    assert "frozen copies" not in stage_memory(setting, 0).parts


def test_what_the_step_scores_is_not_scored_before() -> None:
    within = replace(SIZES, scored_in_training=True, reference=False)
    assert list(moments_of(policy("lora", within))) == ["the sampling of answers"]


def test_idle_states_are_on_the_host_while_answers_are_sampled() -> None:
    (sampling,) = moments_of(policy("full", replace(SIZES, idle_on_host=True)))["the sampling of answers"]
    assert sampling["optimizer"] == 0
    assert moments_of(policy("full", replace(SIZES, idle_on_host=True)))["the scoring of answers"][0]["optimizer"] > 0


@pytest.mark.parametrize(("tuning", "of_weight"), [("full", 4), ("lora", 2)])
def test_an_idle_reward_model_is_on_the_device_only_while_it_scores(tuning: str, of_weight: int) -> None:
    setting = policy(tuning, replace(SIZES, idle_on_host=True))
    setting = replace(setting, work=replace(setting.work, resident=1))
    copies, states = of_weight * setting.shape.parameters, eager_parts(setting, 0)[0]
    assert states[IDLE] == copies and "frozen copies" not in states
    found = moments_of(setting)
    (sampling,), (rewards,) = found["the sampling of answers"], found["the reward model's passes"]
    assert sampling[IDLE] == copies + states["optimizer"] and "frozen copies" not in sampling
    assert rewards[IDLE] == states["optimizer"] and rewards["frozen copies"] == copies
    assert all(parts[IDLE] == copies for parts in found["the scoring of answers"])
    kept = replace(setting, work=replace(setting.work, rollouts=SIZES))
    on_host = stage_memory(setting, 0).host - stage_memory(kept, 0).host
    assert on_host == copies + states["optimizer"]


def test_on_a_cpu_nothing_is_freed_by_moving_what_idles() -> None:
    setting = policy("full", SIZES)
    setting = replace(setting, cluster=load_cluster("cpu"), work=replace(setting.work, resident=1, precision="fp32"))
    moved = replace(setting, work=replace(setting.work, rollouts=replace(SIZES, idle_on_host=True)))
    assert stage_memory(moved, 0).peak == pytest.approx(stage_memory(setting, 0).peak)


def test_a_cache_leaves_a_fifth_of_the_free_memory() -> None:
    shape = shape_of_config({**LLAMA, "num_key_value_heads": 32, "num_hidden_layers": 64, "hidden_size": 512})
    setting = policy("lora", replace(SIZES, prompts=64, tokens=30_000), shape=shape)
    (sampling,) = moments_of(setting)["the sampling of answers"]
    held = sum(sampling.values()) - sampling["keys and values"] - sampling["sampling"]
    free = allocatable_bytes(setting.cluster) - held
    assert sampling["keys and values"] == pytest.approx(0.8 * free, rel=1e-3)


def test_sharded_weights_are_read_with_rows_and_buckets_stay() -> None:
    sharded = policy("full", SIZES, layout=Layout(data=2, shard="zero3", shard_size=2))
    (sampling,) = moments_of(sharded)["the sampling of answers"]
    numbers = 2 * 2 * (4 * 64)
    assert sampling["keys and values"] == 8 * 640 * numbers * 2  # two prompts; 384 columns, then 640
    assert sampling["gradients"] == 0
    copies = policy("full", SIZES, layout=Layout(data=2))
    (sampling,) = moments_of(copies)["the sampling of answers"]
    assert sampling["gradients"] == 4 * copies.shape.parameters


# Peaks of the allocator in a step and the round before it, GiB (benchmarks/without_gpu, torch 2.11,
# 2026-11-28): LoRA of rank 16 on eager blocks; key-value heads, tokens of a prompt, micro-batch, moment.
PEAKS = (
    (RolloutSizes(4, 4, 64, 1, 2, reference=True), 4, 82, 4, "the last micro-batch's loss", 0.622),
    (RolloutSizes(8, 8, 24, 1, 2, reference=True), 32, 450, 2, "the sampling of answers", 2.845),
)


@pytest.mark.parametrize("row", PEAKS, ids=lambda row: row[4])
def test_the_peak_is_that_of_the_step_or_of_the_round(row: tuple[Any, ...]) -> None:
    sizes, heads, prompt, micro_batch, moment, measured = row
    work = TrainingWork(
        shape_of_config({**LLAMA, "num_key_value_heads": heads}),
        prompt + sizes.tokens,
        8,
        tuning="lora",
        rollouts=sizes,
        scores=True,
        computed=prompt / min(micro_batch, sizes.answers) + sizes.tokens,
        predicted=sizes.tokens,
        prompt=prompt,
    )
    setting = Setting(work, load_cluster("1xH200"), Layout(), micro_batch, software=replace(STOKER, compiles="never"))
    memory = stage_memory(setting, 0)
    assert memory.peak / 2**30 == pytest.approx(measured, rel=0.03)
    assert memory.moment == moment


def test_a_reward_model_reads_answers_block_by_block() -> None:
    setting = policy("lora", SIZES)
    few, many = replace(SIZES, prompts=2), replace(SIZES, prompts=64)
    found = []
    for sizes in (few, many):
        work = replace(setting.work, resident=1, rollouts=sizes)
        (parts,) = moments_of(replace(setting, work=work))["the reward model's passes"]
        assert parts["frozen copies"] == 2 * setting.shape.parameters
        found.append(parts["activations"])
    of_token = 2 * 2048 + 2 * (3 * 5632 + 2048)  # hidden states, the MLP's input and its three tensors
    assert found == [8 * 512 * of_token, 8192 * of_token]  # all answers, or those of a pass
    assert "the reward model's passes" not in moments_of(setting)


def test_answers_beyond_the_rows_of_a_step_wait() -> None:
    at_once, more = (policy("lora", replace(SIZES, prompts=n)) for n in (64, 256))
    of_one, of_four = (moments_of(each)["the sampling of answers"][0] for each in (at_once, more))
    assert of_one["keys and values"] == of_four["keys and values"]


OF_TOKEN = 2 * 2048 + 2 * (3 * 5632 + 2048)  # of a block: hidden states, the MLP's input and its three tensors


def shape_of(**sizes: Any) -> Shape:
    """Returns the Llama with other sizes."""
    return shape_of_config({**LLAMA, **sizes})


def sampling_of(setting: Setting) -> dict[str, float]:
    return moments_of(setting)["the sampling of answers"][0]


def test_a_decoding_step_holds_26_bytes_a_logit_in_16_bits_and_24_in_float32() -> None:
    setting = policy("lora", replace(SIZES, prompts=64), shape=shape_of(vocab_size=64000))
    wide = replace(setting, work=replace(setting.work, precision="fp32"))
    assert sampling_of(setting)["sampling"] == 256 * 64000 * 26
    assert sampling_of(wide)["sampling"] == 256 * 64000 * 24


def test_under_full_tuning_the_weights_are_copied_and_else_the_largest_matrix_is_cast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setting = policy("full", SIZES)
    matrices = sum(m.parameters for i in range(2) for m in setting.shape.layer_matmuls(i)) + 32000 * 2048
    copied = sampling_of(setting)
    monkeypatch.setattr(rollout_memory, "SHARE_OF_CASTS", 0.0)
    cast = sampling_of(setting)
    assert cast["sampling"] == 2 * 32000 * 2048
    beside = copied["sampling"] - 2 * matrices  # a pass over prompts or a step, without the cast matrix
    assert 0 < beside < cast["sampling"] and copied["keys and values"] == cast["keys and values"]


def test_a_pass_over_prompts_is_beside_the_first_pages() -> None:
    found = sampling_of(policy("lora", replace(SIZES, tokens=8)))
    rows = 4 * 384 * 2 * 512 * 2  # four prompts in 384 columns
    assert found["keys and values"] + found["sampling"] == rows + 4 * 256 * OF_TOKEN


def test_the_first_step_is_computed_with_rows_beside_the_pages() -> None:
    found = sampling_of(policy("lora", replace(SIZES, answers=16, tokens=8), shape=shape_of(num_key_value_heads=32)))
    assert found["keys and values"] == 256 * PAGE * 2 * 4096 * 2
    assert found["sampling"] == 64 * 384 * 2 * 4096 * 2


def test_prompts_of_later_rows_are_read_in_smaller_pieces() -> None:
    shape = shape_of(vocab_size=1000, num_key_value_heads=1)
    found = sampling_of(policy("lora", replace(SIZES, prompts=256, tokens=8), shape=shape))
    assert found["sampling"] == (8 * 384 * 2 * 128 * 2 + 2048 * OF_TOKEN) / 4


@pytest.mark.parametrize(("tuning", "size"), [("lora", 2), ("full", 3)])
def test_models_that_do_not_pack_keep_rows(tuning: Any, size: int) -> None:
    """Under autocast rotated keys are in float32, values in 16 bits."""
    config = {"model_type": "falcon", "hidden_size": 2048, "num_attention_heads": 32, "num_hidden_layers": 2}
    shape = shape_of_config(config)
    found = sampling_of(policy(tuning, SIZES, shape=shape))
    assert found["keys and values"] == 16 * 640 * 2 * 2 * shape.key_value_width * size


def test_a_pass_over_prompts_with_sharded_weights() -> None:
    found = sampling_of(policy("full", SIZES, layout=Layout(data=2, shard="zero3", shard_size=2)))
    assert found["sampling"] == 2 * 384 * 2 * 512 * 2 + 2 * 256 * OF_TOKEN


def test_tensor_parallelism_splits_the_cache_and_the_logits_that_are_read() -> None:
    one, two = policy("lora", SIZES), policy("lora", SIZES, layout=Layout(tensor=2))
    assert sampling_of(two)["keys and values"] == sampling_of(one)["keys and values"] / 2
    hidden = 4 * 256 * 2048 * 4
    for setting, tensor in ((one, 1), (two, 2)):
        old, _ = moments_of(setting)["the scoring of answers"]
        assert old["head"] == 2 * 4 * 4 * 256 * 32000 / tensor + hidden
    old, _ = moments_of(policy("full", SIZES))["the scoring of answers"]
    cast = 2 * 32000 * 2048
    assert old["head"] == 2 * 4 * 4 * 256 * 32000 + cast + 1.5 * hidden  # which the norm gives in float32


MIXTURE = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 3}


@pytest.mark.parametrize(
    ("sizes", "of_token"),
    [
        ({}, OF_TOKEN),
        ({"intermediate_size": 64}, 2 * 2048 + 2 * 4 * 2048),  # the norm in float32
        (MIXTURE, 2 * 2048 + 2 * (3 * 3 * 5632 + 3 * 2048 + 2048)),  # of each expert its three tensors and its result
    ],
    ids=["dense", "narrow", "experts"],
)
def test_scoring_with_few_logits_is_as_full_as_a_block(sizes: dict[str, Any], of_token: int) -> None:
    shape = shape_of(vocab_size=100, **sizes)
    old, _ = moments_of(policy("lora", SIZES, shape=shape))["the scoring of answers"]
    assert (old["activations"], old["head"]) == (4 * 512 * of_token, 0)


@pytest.mark.parametrize("tensor", [1, 2])
def test_linear_attention_is_the_fullest_of_a_block_with_a_narrow_mlp(tensor: int) -> None:
    shape = shape_of_config(LINEAR)
    rule = most_of_rule(shape.delta_net, 2, processor=False)  # type: ignore[arg-type]
    old, _ = moments_of(policy("lora", SIZES, shape=shape, layout=Layout(tensor=tensor)))["the scoring of answers"]
    assert old["activations"] == 4 * 512 * (2 * shape.width + rule / tensor + 2 * shape.width)


def test_a_cpu_reads_smaller_chunks_of_logits() -> None:
    setting = policy("lora", SIZES, shape=shape_of(intermediate_size=64))
    on_cpu = replace(setting, cluster=load_cluster("cpu"), work=replace(setting.work, precision="fp32"))
    old, reference = moments_of(on_cpu)["the scoring of answers"]
    assert (old["head"], reference["head"]) == (2 * 2**26 + 4 * 256 * 2048 * 8, 2**26 + 4 * 256 * 2048 * 8)


def test_latent_attention_keeps_the_keys_and_values_of_all_heads() -> None:
    """transformers stores them, and not the compressed ones."""
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 2}
    sizes |= {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
    config = AutoConfig.for_model("deepseek_v3", **sizes, first_k_dense_replace=2).to_dict()
    found = sampling_of(policy("lora", SIZES, shape=shape_of_config(config)))
    assert found["keys and values"] == 256 * PAGE * 2 * 8 * (48 + 32) * 2
