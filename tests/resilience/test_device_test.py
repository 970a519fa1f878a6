"""A good device passes quickly, a wrong product and a wrong sum are found, a slow GPU is left out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from stoker.checkpoint.object_collectives import run_on_all_ranks
from stoker.launch.process_pool import Pool
from stoker.resilience import device_test
from stoker.resilience.device_test import (
    DeviceReport,
    bfloat16_problem,
    check_device,
    code_differs,
    data_differs,
    find_faults,
    measure_disk,
    product_problem,
)
from stoker.resilience.gpu_state import GpuState

GOOD = DeviceReport(0, "node1", "H100 0", False, "", 50e12, None, 1e9, 1000.0, "code", 0.5)


def reported() -> list[DeviceReport]:
    return run_on_all_ranks(lambda: check_device(torch.device("cpu"), dist.get_rank()))


def same_data(mine: list[Mapping[str, str]]) -> tuple[int, str] | None:
    return data_differs(mine[dist.get_rank()])


@pytest.mark.pool
def test_two_good_processes(pool: Pool) -> None:
    for reports in pool.run(reported, world=2):
        assert [(r.rank, r.wrong, r.is_cpu) for r in reports] == [(0, "", True), (1, "", True)]
        assert not [f for f in find_faults(reports) if f.out] and code_differs(reports) is None
        assert all(r.rate > 1e8 and r.reduce > 1e5 for r in reports)


@pytest.mark.pool
def test_other_data_is_named(pool: Pool) -> None:
    assert pool.run(same_data, [{"a": "1", "b": "2"}] * 2, world=2) == [None] * 2
    other = [{"a": "1", "b": "2"}, {"a": "1", "b": "3"}]
    assert pool.run(same_data, other, world=2) == [(1, "b")] * 2
    for one, two in (({"a": "1"}, {}), ({}, {"a": "1"})):  # a source that one of them lacks
        assert pool.run(same_data, [one, two], world=2) == [(1, "a")] * 2


def with_wrong_sums() -> list[DeviceReport]:
    right = dist.all_reduce
    dist.all_reduce = lambda tensor, **_: tensor.zero_()
    try:
        return reported()
    finally:
        dist.all_reduce = right


@pytest.mark.pool
def test_a_wrong_sum_is_found(pool: Pool) -> None:
    for reports in pool.run(with_wrong_sums, world=2):
        assert [report.wrong for report in reports] == ["all-reduce returned wrong sums"] * 2


def test_one_wrong_bit_in_a_product_is_found() -> None:
    def flips(a: Tensor, b: Tensor) -> Tensor:
        product = a @ b
        product.view(torch.int32)[17, 200] ^= 1 << 3
        return product

    cpu = torch.device("cpu")
    assert product_problem(cpu, torch.matmul) == ""
    assert product_problem(cpu, flips) == "computes wrong matrix products"


def test_one_wrong_bit_in_a_product_in_bfloat16_is_found() -> None:
    def flips(a: Tensor, b: Tensor) -> Tensor:
        product = a @ b
        product.view(torch.int16)[17, 200] ^= 1
        return product

    cpu = torch.device("cpu")
    assert bfloat16_problem(cpu, torch.matmul) == ""
    assert bfloat16_problem(cpu, flips) == "computes wrong matrix products in bfloat16"


def test_what_follows_from_what_was_found() -> None:
    good = [replace(GOOD, rank=rank) for rank in range(4)]
    assert find_faults(good) == []
    (wrong,) = find_faults([*good, replace(GOOD, rank=4, wrong="computes wrong matrix products")])
    assert (
        wrong.out and wrong.ranks == (4,) and wrong.message == "H100 0 of node1 (rank 4) computes wrong matrix products"
    )
    slow = replace(GOOD, rank=4, rate=20e12)
    (found,) = find_faults([*good, slow])
    assert found.out and "20,000 GFLOP/s; expected 50,000" in found.message
    assert not find_faults([*good, replace(slow, rate=30e12)])
    (told,) = find_faults([*good, replace(slow, is_cpu=True)])
    assert not told.out  # what else runs on a processor is not its fault
    (alone,) = find_faults([replace(GOOD, expected=200e12)])  # against what was measured of it before
    assert alone.out
    throttled = replace(slow, gpu=GpuState(notes=("has 2 uncorrectable memory errors",), throttled="it is too hot"))
    hot, memory = find_faults([*good, throttled])
    assert hot.message.endswith("expected 50,000; it is too hot")
    assert not memory.out and memory.message == "H100 0 of node1 (rank 4) has 2 uncorrectable memory errors"
    (clock,) = find_faults([*good, replace(GOOD, rank=4, host="node2", clock=1100.0)])
    assert not clock.out and clock.message == "the clock of node2 is +100 s off"
    (behind,) = find_faults([*good, replace(GOOD, rank=4, host="node2", clock=990.0)])
    assert behind.message == "the clock of node2 is -10 s off"
    assert not find_faults([*good, replace(GOOD, rank=4, clock=1004.0)])
    assert code_differs([*good, replace(GOOD, rank=4, code="other")]) == replace(GOOD, rank=4, code="other")


def test_a_gpu_that_is_to_be_replaced_fails_its_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_test, "device_address", lambda _: "0000:1b:00")
    states = {"0000:1b:00": GpuState(failed="has memory rows that could not be remapped")}
    monkeypatch.setattr(device_test, "gpu_state", states.__getitem__)
    (found,) = find_faults([check_device(torch.device("cpu"), 0)])
    assert found.out and found.message.endswith("has memory rows that could not be remapped")


def test_a_disk(tmp_path: Path) -> None:
    free, rate = measure_disk(tmp_path / "not" / "yet")
    there = os.statvfs(tmp_path)
    assert free == pytest.approx(there.f_bavail * there.f_frsize, rel=0.05) and rate > 1e5
    assert list(tmp_path.iterdir()) == []
