"""Calibration: measured against a direct timing, interpolated against closed forms; a foreign file is refused."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import date, timedelta
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from stoker.errors import UserError
from stoker.hardware.cache_folder import device_file
from stoker.hardware.measured import calibrate as calibrate_module
from stoker.hardware.measured.calibrate import TENSORS, calibrate, tensors_that_fit, time_collectives
from stoker.hardware.measured.calibration import (
    HEAD_SIZES,
    Calibration,
    Curve,
    MatmulTable,
    kept_calibration,
    read_calibration,
)
from stoker.hardware.process_device import Device

CPU = Device("cpu", "fp32", "for a test")


@pytest.fixture(scope="module")
def measured() -> Calibration:
    return calibrate(2.0, device=CPU, threads=1, sizes=(16, 64, 256), tensors=(2**14, 2**20))


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_the_rate_of_products_agrees_with_a_direct_timing() -> None:
    # What else runs here may slow either down; a formula that is wrong would disagree every time.
    ratios = [_measured_by_direct()]
    while not any(1 / 1.5 < ratio < 1.5 for ratio in ratios) and len(ratios) < 12:
        ratios.append(_measured_by_direct())
    assert any(1 / 1.5 < ratio < 1.5 for ratio in ratios), ratios


def _measured_by_direct() -> float:
    before = torch.get_num_threads()
    rate = calibrate(0.5, device=CPU, threads=1, sizes=(64, 256), tensors=(2**14,)).matmul_rate(256, 256, 256)
    torch.set_num_threads(1)
    try:
        x, w = torch.randn(256, 256), torch.randn(256, 256)
        fastest = min(_taken(lambda: F.linear(x, w)) for _ in range(100))
    finally:
        torch.set_num_threads(before)
    return rate * fastest / (2 * 256**3)


@pytest.mark.slow
def test_what_is_measured_is_plausible(measured: Calibration) -> None:
    assert (measured.threads, measured.precisions, measured.torch) == (1, ("fp32",), torch.__version__)
    assert measured.matmul_rate(256, 256, 256) > measured.matmul_rate(16, 16, 16)
    assert 1e-8 < measured.launch_s < 1e-3
    for kind in ("read", "write", "copy", "add", "silu"):
        assert 1e7 < (measured.bandwidth(kind) or 0) < 1e13
    assert measured.bandwidth("to-device") is None


def _taken(work) -> float:  # type: ignore[no-untyped-def]
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def test_interpolation_is_exact_where_time_is_a_power_law() -> None:
    sizes = (16, 64, 256)
    seconds = tuple(1e-9 * m**0.9 * n**0.8 * k**0.7 for m, n, k in product(sizes, repeat=3))
    table = MatmulTable("fp32", sizes, seconds)
    for m, n, k in ((16, 16, 16), (256, 64, 16), (100, 33, 200), (17, 255, 64)):
        assert table.rate(m, n, k) == pytest.approx(2 * m * n * k / (1e-9 * m**0.9 * n**0.8 * k**0.7))


def test_beyond_the_grid_large_products_keep_their_rate_and_small_ones_their_time() -> None:
    sizes = (16, 64)
    table = MatmulTable("fp32", sizes, tuple(1e-9 * m * n * k for m, n, k in product(sizes, repeat=3)))
    assert table.rate(4096, 64, 128) == pytest.approx(table.rate(64, 64, 64)) == pytest.approx(2e9)
    assert 2 * 64 * 64 * 4 / table.rate(64, 64, 4) == pytest.approx(1e-9 * 64 * 64 * 16)


def test_times_of_a_curve() -> None:
    curve = Curve("all-reduce", (1000, 100_000), (1e-5, 1e-3), 4)
    assert curve.time(10_000) == pytest.approx(1e-4)
    assert curve.time(10) == curve.latency == 1e-5
    assert curve.time(1_000_000) == pytest.approx(1e-2)
    assert curve.bandwidth == pytest.approx(1e8)


@pytest.mark.slow
def test_a_calibration_is_saved_and_found_again(measured: Calibration, cache: Path) -> None:
    assert kept_calibration(measured.device, 1) is None
    path = measured.save()
    assert path == device_file("calibration", measured.device, 1) and cache in path.parents
    assert kept_calibration(measured.device, 1) == measured
    assert kept_calibration(measured.device, 2) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "Other"}, "is of another device \\(Other; here is"),
        ({"threads": 7}, "was measured with 7 threads, not 1"),
        ({"torch": "1.0.0"}, "was measured with PyTorch 1.0.0, and"),
        ({"date": (date.today() - timedelta(days=200)).isoformat()}, "is 200 days old, and is not used; measure"),
    ],
)
@pytest.mark.slow
def test_a_stale_or_foreign_one_is_refused(
    change: dict[str, object], message: str, measured: Calibration, tmp_path: Path
) -> None:
    path = replace(measured, **change).save(tmp_path / "kept.json")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=message):
        read_calibration(path, device=measured.device, threads=1)


@pytest.mark.parametrize("damage", ["", "{}", "[]", '{"format": 1}', '{"format": 99}'])
def test_a_damaged_one_is_refused(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    path.write_text(damage)
    with pytest.raises(UserError, match=r"kept\.json: the calibration .*, and is not used"):
        read_calibration(path)


def test_times_that_do_not_match_the_sizes_are_damage(measured: Calibration, tmp_path: Path) -> None:
    path = measured.save(tmp_path / "kept.json")
    data = json.loads(path.read_text())
    data["matmuls"][0]["seconds"].pop()
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match="damaged"):
        read_calibration(path)


def test_a_date_that_is_none_is_damage(measured: Calibration, tmp_path: Path) -> None:
    path = replace(measured, date="yesterday").save(tmp_path / "kept.json")
    with pytest.raises(UserError, match="damaged"):
        read_calibration(path)


def test_a_precision_that_was_not_measured_is_told(measured: Calibration) -> None:
    with pytest.raises(UserError, match="in bf16 were not measured, only in fp32"):
        measured.matmul_rate(1, 1, 1, "bf16")


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_collectives_are_timed_by_kind_and_size(measured: Calibration) -> None:
    curves = time_collectives((1024, 4096))
    assert [curve.kind for curve in curves] == ["all-reduce", "all-gather", "reduce-scatter", "all-to-all"]
    assert all(curve.sizes == (1024, 4096) and curve.ranks == 1 and min(curve.seconds) > 0 for curve in curves)
    with_them = measured.with_collectives(curves).with_collectives(curves)
    assert with_them.curve("all-gather") == curves[1]
    assert len(with_them.curves) == len(measured.curves) + 4


def test_attention_and_calls_are_measured(measured: Calibration, tmp_path: Path) -> None:
    again = read_calibration(measured.save(tmp_path / "found.json"))
    for size in HEAD_SIZES:
        assert 0 < measured.attention(size, 256) < measured.attention(size, 1024) == again.attention(size, 1024)
        assert measured.attention(size, 1024, backward=True) > measured.attention(size, 1024)
    assert measured.call_seconds() > 0 and measured.call_seconds(backward=True) > 0
    assert measured.bandwidth("multiply", 2**16) and measured.bandwidth("dropout", 2**16)


def test_attention_is_measured_without_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch may prefer it on Hopper, and not for the rows of training."""
    enabled: list[bool] = []

    def attention(*tensors: torch.Tensor, is_causal: bool) -> torch.Tensor:
        enabled.append(torch.backends.cuda.cudnn_sdp_enabled())
        return torch.stack(tensors).sum(0)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        calibrate_module._attention((8,), 0.0, Device("cpu", "fp32", ""))
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
    assert enabled and not any(enabled)


def test_attention_that_was_not_measured_is_no_guess(measured: Calibration) -> None:
    with pytest.raises(UserError, match="attention was not measured"):
        replace(measured, curves=()).attention(64, 512)


def test_a_small_gpu_is_measured_with_smaller_tensors() -> None:
    assert tensors_that_fit(TENSORS["cuda"], 80 * 2**30) == TENSORS["cuda"]
    assert tensors_that_fit(TENSORS["cuda"], 4 * 2**30) == TENSORS["cuda"][:-1]
