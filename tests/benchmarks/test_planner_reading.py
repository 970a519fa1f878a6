"""What rows leave open, and what they say in other words."""

from __future__ import annotations

from typing import Any

import pytest
from planner_runs.cases import predict, setting_of
from planner_runs.reading import reading_of

LLAMA: dict[str, Any] = {
    "row_id": 1, "source": "pytorch/torchtitan", "model_name": "llama3-8b", "seq_len": 8192,
    "gpu": "H100-96GB-HBM2e-500W", "num_gpus": 64, "dp": 64, "fsdp": True, "micro_batch": 2, "global_batch": 128,
    "recompute": "selective op", "precision": "bf16",
}  # fmt: skip


def test_what_decides_and_is_not_stated_is_at_risk() -> None:
    """Llama 3 8B, two rows of 8,192 tokens: 107 GiB with all activations, under 50 with every other product again."""
    verdicts = [predict({**LLAMA, "recompute": value}).verdict for value in ("unknown", None, "selective", "full")]
    assert verdicts == ["AT RISK", "AT RISK", "FITS", "FITS"]
    stated = {"source": "a run of nanotron", "zero_stage": 1, "gpu": "A100-80GB", "micro_batch": 1}
    assert predict({**LLAMA, **stated, "recompute": "none"}).verdict == "DOES NOT FIT"
    assert predict({**LLAMA, **stated, "recompute": None}).verdict == "AT RISK"


def test_defaults_come_first() -> None:
    settings = reading_of({**LLAMA, "recompute": None}).settings
    assert settings[0] == setting_of({**LLAMA, "recompute": None}) and settings[0].layout.recompute == "none"
    assert {each.layout.recompute for each in settings} == {"none", "selective", "full"}


def test_float8_with_recomputed_operators() -> None:
    """As published of 64 H100: 47 GiB; and float8 is faster than bf16."""
    found = predict({**LLAMA, "precision": "float8"})
    assert found.memory_gib == pytest.approx(47, rel=0.1)
    bf16 = predict(LLAMA)
    assert found.step_time_s is not None and bf16.step_time_s is not None
    assert 0.5 < found.step_time_s / bf16.step_time_s < 0.85


def test_types_of_sums_do_not_slow_the_products() -> None:
    plain, said = (predict({**LLAMA, "precision": p}) for p in ("bf16", "bf16 + fp32 grad accumulation"))
    assert said.step_time_s == plain.step_time_s and not said.notes


def test_short_states_take_less() -> None:
    row = {**LLAMA, "num_gpus": 8, "dp": 8, "precision": "bf16"}
    sizes = [
        predict({**row, "precision": p}).memory_gib or 0
        for p in ("bf16", "bf16 (params and optimizer bf16)", "bf16 (params bf16), 8-bit AdamW")
    ]
    per = 8.03e9 / 8 / 2**30
    assert sizes[0] - sizes[1] > 7 * per  # 16 bytes, and 8
    assert sizes[1] - sizes[2] == pytest.approx(2 * per, rel=0.01)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("precision", "posit16", "`precision`: `posit16` of `posit16` is not known, products taken as bf16"),
        ("recompute", "banana", "`recompute`: `banana` is not known"),
        ("fsdp", "quantum", "`fsdp`: `quantum` is not known"),
        ("zero_stage", "banana", "`zero_stage`: `banana` is not known"),
        (
            "interconnect",
            "carrier pigeons",
            "`interconnect`: `carrier pigeons` is not known, taken as in hgx-",
        ),
    ],
)
def test_unknown_phrases_are_notes(key: str, value: str, said: str) -> None:
    (note,) = predict({**LLAMA, key: value}).notes
    assert note.startswith(said)
    assert not predict(LLAMA).notes


def test_hybrid_sharding_stays_inside_nodes() -> None:
    layout = setting_of({**LLAMA, "fsdp": "HSDP"}).layout
    assert (layout.shard, layout.shard_size, layout.replicas) == ("zero3", 8, 8)


@pytest.mark.parametrize("network", ["400 Gb/s", "800 Gb/s"])
@pytest.mark.parametrize("fsdp", ["HSDP", True])
def test_what_travels_beside_the_passes_costs_little(fsdp: object, network: str) -> None:
    """7 billion parameters on 128 A100, rows of 4,096: what is stated costs under a tenth more than 1,600 Gb/s."""
    row = {
        **LLAMA, "model_name": "llama2-7b", "seq_len": 4096, "gpu": "A100", "num_gpus": 128, "dp": 128, "fsdp": fsdp,
        "global_batch": 256, "recompute": "none",
    }  # fmt: skip
    slow, fast = (predict({**row, "interconnect": rate}).step_time_s or 0 for rate in (network, None))
    assert fast < slow < 1.1 * fast


@pytest.mark.parametrize(
    ("gpu", "nodes", "least"), [("MI300X", 8, 0.3), ("MI325X", 8, 0.35), ("MI355X", 8, 0.35), ("MI250X", 4, 0.25)]
)
def test_amd_devices_have_a_network(gpu: str, nodes: int, least: float) -> None:
    """Nodes of these devices have a port of 400 Gb/s a device, and what links them inside is not their network."""
    row = {
        "row_id": 1, "source": "AMD Primus", "model_name": "llama2-7b", "seq_len": 4096, "gpu": gpu, "micro_batch": 2,
        "num_gpus": 8 * nodes, "dp": 8 * nodes, "global_batch": 512, "recompute": "none", "precision": "bf16",
    }  # fmt: skip
    for network in (None, "xGMI 128 GB/s", "Infinity Fabric"):
        found = predict({**row, "interconnect": network})
        assert found.mfu is not None and least < found.mfu < 0.6 and not found.notes


@pytest.mark.parametrize(("micro_batch", "batch"), [(1, 128), (1, 512), (2, 512)])
def test_mi355x_is_as_fast_as_published(micro_batch: int, batch: int) -> None:
    """Qwen3 235B in a pipeline over 4 nodes, 1F1B (Primus' pipeline blog): 2,742 tokens/s; no batch is stated."""
    found = predict({
        "row_id": 1, "source": "Megatron", "model_name": "qwen3-235b-a22b", "seq_len": 4096, "gpu": "MI355X",
        "num_gpus": 32, "pp": 4, "ep": 8, "micro_batch": micro_batch, "global_batch": batch, "recompute": "none",
    })  # fmt: skip
    assert found.tokens_per_s_per_gpu == pytest.approx(2742, rel=0.25)


def test_llama_2_on_mi300x() -> None:
    """AMD's tokens a second of a pipeline over eight MI300X, 1F1B (Primus, zero-bubble schedules): 10,057."""
    row = {
        "row_id": 1, "source": "AMD Primus", "model_name": "llama2-7b", "seq_len": 4096, "gpu": "MI300X", "num_gpus": 8,
        "pp": 8, "micro_batch": 4, "global_batch": 256, "recompute": "none", "precision": "bf16",
    }  # fmt: skip
    assert predict(row).tokens_per_s_per_gpu == pytest.approx(10057, rel=0.25)
