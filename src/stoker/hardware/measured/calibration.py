"""Measurements of a machine: rates by size, latencies, bandwidths; stored as JSON."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any

from stoker.errors import Problem, UserError
from stoker.files import replace_file
from stoker.hardware.cache_folder import device_file
from stoker.hardware.measured.nccl_settings import NcclHost, NcclSettings

FORMAT = 2  # 2: with attention and calls
LONGEST = 180  # days that a measurement is valid
HEAD_SIZES = (32, 64, 128)  # that attention is measured with
_AGAIN = "measure this machine with `stoker plan --calibrate`"


@dataclass(frozen=True)
class MatmulTable:
    """Times of products (m, k) x (k, n) over a grid: each of m, n and k takes each of the sizes.

    Attributes:
        precision: of both factors.
        sizes: ascending.
        seconds: of one product, in the order of m, then n, then k.
    """

    precision: str
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def rate(self, m: int, n: int, k: int) -> float:
        """FLOP/s (2mnk a product), log-log between the sizes.

        Above the largest size the rate stays; below the smallest the time does, since it is a call's own time there.
        """
        smallest, largest = self.sizes[0], self.sizes[-1]
        flops, corners = 0.0, []
        for size in (m, n, k):
            inside = min(max(size, smallest), largest)
            low = max(0, min(bisect_right(self.sizes, inside) - 1, len(self.sizes) - 2))
            high = min(low + 1, len(self.sizes) - 1)
            span = math.log(self.sizes[high] / self.sizes[low])
            above = math.log(inside / self.sizes[low]) / span if span else 0.0
            corners.append(((low, 1 - above), (high, above)))
            flops += math.log(inside) + min(0.0, math.log(size / smallest))
        count = len(self.sizes)
        seconds = sum(
            math.prod(weight for _, weight in corner)
            * math.log(self.seconds[(corner[0][0] * count + corner[1][0]) * count + corner[2][0]])
            for corner in product(*corners)
        )
        return 2 * math.exp(flops - seconds)


@dataclass(frozen=True)
class Curve:
    """Times by size of one operation that moves or computes bytes.

    Attributes:
        kind: ``read``, ``write``, ``copy``, ``add``, ``silu``, ``dropout``, ``multiply`` (a device's memory; the last
            into new memory, from operands outside the near caches; in the last two, writes count twice, since the
            lines are read into a cache first); ``to-device``, ``to-host``;
            ``all-reduce``, ``all-gather``, ``reduce-scatter``, ``all-to-all``, ``send`` (between processes);
            ``forward``, ``backward`` (a call with almost no work);
            ``attention-32``, ``attention-backward-32`` and so on (one head of a size).
        sizes: bytes, ascending: those that cross the memory bus, or of the whole tensor of a collective; for attention
            the tokens of a row.
        seconds: for each size.
        ranks: processes that take part.
    """

    kind: str
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    ranks: int = 1

    def time(self, size: float) -> float:
        """Seconds for a size: log-log between the sizes, the smallest's time below, the largest's rate above."""
        if size <= self.sizes[0]:
            return self.seconds[0]
        if size >= self.sizes[-1]:
            return self.seconds[-1] * size / self.sizes[-1]
        high = bisect_right(self.sizes, size)
        low = high - 1
        above = math.log(size / self.sizes[low]) / math.log(self.sizes[high] / self.sizes[low])
        return math.exp((1 - above) * math.log(self.seconds[low]) + above * math.log(self.seconds[high]))

    def faster(self, factor: float, *, latency: float) -> Curve:
        """Returns the times with ``factor`` times the bandwidth, and a fraction of the latency."""
        seconds = (latency * self.latency + (each - self.latency) / factor for each in self.seconds)
        return replace(self, seconds=tuple(seconds))

    @property
    def latency(self) -> float:
        """Seconds of the smallest message."""
        return self.seconds[0]

    @property
    def bandwidth(self) -> float:
        """Bytes per second at the largest size."""
        return self.sizes[-1] / self.seconds[-1]


@dataclass(frozen=True)
class Calibration:
    """The measured rates of one device.

    Attributes:
        date: ISO.
        machine: the host's name, for the reader.
        device: the maker's name of the processor or GPU.
        threads: of the process that measured, on a CPU; 0 on a GPU.
        torch: its version.
        matmuls: a table for each precision.
        curves: memory, host copies and collectives.
        launch_s: seconds of an operator with almost no work.
        nccl: the fastest settings of NCCL; None if they were not searched.
    """

    date: str
    machine: str
    device: str
    threads: int
    torch: str
    matmuls: tuple[MatmulTable, ...]
    curves: tuple[Curve, ...]
    launch_s: float
    nccl: NcclSettings | None = None

    @property
    def precisions(self) -> tuple[str, ...]:
        """Returns the precisions of the measured matrix products."""
        return tuple(table.precision for table in self.matmuls)

    def matmul_rate(self, m: int, n: int, k: int, precision: str = "fp32") -> float:
        """Returns the FLOP/s of a product (m, k) x (k, n). Raises UserError if the precision was not measured."""
        for table in self.matmuls:
            if table.precision == precision:
                return table.rate(m, n, k)
        measured = ", ".join(self.precisions)
        raise UserError(Problem(f"matrix products in {precision} were not measured, only in {measured}", _AGAIN))

    def curve(self, kind: str, ranks: int = 1) -> Curve | None:
        """Returns the times of a kind of collective between ``ranks`` processes; None if they were not measured."""
        return next((curve for curve in self.curves if (curve.kind, curve.ranks) == (kind, ranks)), None)

    def collective(self, kind: str, ranks: int) -> Curve | None:
        """Returns the times of a kind of collective between the next larger measured number of processes, or the
        largest; None without any.
        """
        curves = (curve for curve in self.curves if curve.kind == kind and curve.ranks > 1)
        return min(curves, key=lambda curve: (curve.ranks < ranks, abs(curve.ranks - ranks)), default=None)

    @property
    def measured_ranks(self) -> tuple[int, ...]:
        """Numbers of processes between which collectives were measured."""
        return tuple(sorted({curve.ranks for curve in self.curves if curve.ranks > 1}))

    def bandwidth(self, kind: str = "copy", size: float | None = None) -> float | None:
        """Bytes per second that cross the device's memory bus, for tensors of a size, by default large ones.

        None if the kind was not measured.
        """
        curve = self.curve(kind)
        if curve is None:
            return None
        return curve.bandwidth if size is None else size / curve.time(size)

    def attention(self, head_size: int, seq_len: int, *, backward: bool = False) -> float:
        """Seconds of causal attention of one head over one row: linear between the head sizes, square above all rows.

        Raises:
            UserError: attention was not measured.
        """
        kind = "attention-backward" if backward else "attention"
        curves = [curve for size in HEAD_SIZES if (curve := self.curve(f"{kind}-{size}")) is not None]
        if len(curves) < len(HEAD_SIZES):
            raise UserError(Problem("attention was not measured", _AGAIN))
        inside = min(seq_len, curves[0].sizes[-1])
        above = min(max(1, bisect_right(HEAD_SIZES, head_size)), len(HEAD_SIZES) - 1)
        small, large = curves[above - 1].time(inside), curves[above].time(inside)
        share = (head_size - HEAD_SIZES[above - 1]) / (HEAD_SIZES[above] - HEAD_SIZES[above - 1])
        return max(small + share * (large - small), small / 2) * (seq_len / inside) ** 2

    def call_seconds(self, *, backward: bool = False) -> float:
        """Seconds of a tiny operator that autograd records, or of its backward pass; else of a launch alone."""
        curve = self.curve("backward" if backward else "forward")
        return self.launch_s if curve is None else curve.latency

    def with_collectives(self, curves: Sequence[Curve]) -> Calibration:
        """Returns the calibration with these collectives in place of those of the same ranks and kinds."""
        new = {(curve.kind, curve.ranks) for curve in curves}
        kept = tuple(curve for curve in self.curves if (curve.kind, curve.ranks) not in new)
        return replace(self, curves=(*kept, *curves))

    def with_faster_links(self, factor: float, *, latency: float) -> Calibration:
        """Returns the calibration with collectives of ``factor`` times the bandwidth, and a part of the latency."""
        curves = (curve if curve.ranks == 1 else curve.faster(factor, latency=latency) for curve in self.curves)
        return replace(self, curves=tuple(curves))

    def save(self, path: Path | None = None) -> Path:
        """Writes it, by default to the path that `kept_calibration` reads, and returns the path."""
        path = path or device_file("calibration", self.device, self.threads)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")
        return path


def kept_calibration(device: str, threads: int) -> Calibration | None:
    """Returns the stored calibration of this device; None if there is none.

    Raises:
        UserError: it is stale, or of another device: see `read_calibration`.
    """
    path = device_file("calibration", device, threads)
    return read_calibration(path, device=device, threads=threads) if path.is_file() else None


def read_calibration(path: Path, *, device: str | None = None, threads: int | None = None) -> Calibration:
    """Returns a calibration from its file.

    Args:
        device, threads: whose it must be; by default anyone's.

    Raises:
        UserError: it is damaged, of another format, device or number of threads, of another PyTorch, or older than
            180 days.
    """
    try:
        data = json.loads(path.read_text())
        if data.pop("format") != FORMAT:
            raise _refused(path, "is of another format")
        found = _from_json(data)
        age = (date.today() - date.fromisoformat(found.date)).days
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _refused(path, "is not a calibration, or a damaged one") from error
    if device is not None and found.device != device:
        raise _refused(path, f"is of another device ({found.device}; here is {device})")
    if threads is not None and found.threads != threads:
        raise _refused(path, f"was measured with {found.threads} threads, not {threads}")
    here = _torch_version()
    if here and _minor(here) != _minor(found.torch):
        raise _refused(path, f"was measured with PyTorch {found.torch}, and {here} is installed")
    if age > LONGEST:
        raise _refused(path, f"is {age} days old")
    return found


def _from_json(data: Mapping[str, Any]) -> Calibration:
    tables = tuple(MatmulTable(t["precision"], tuple(t["sizes"]), tuple(t["seconds"])) for t in data["matmuls"])
    curves = tuple(Curve(c["kind"], tuple(c["sizes"]), tuple(c["seconds"]), c["ranks"]) for c in data["curves"])
    if any(len(t.seconds) != len(t.sizes) ** 3 for t in tables) or any(len(c.sizes) != len(c.seconds) for c in curves):
        raise ValueError("sizes and times do not match")
    nccl = data.get("nccl")
    if nccl is not None:
        host = NcclHost(**{**nccl["host"], "gpus": tuple(nccl["host"]["gpus"])})
        nccl = NcclSettings(host, nccl["variables"], tuple(nccl["failed"]))
    return Calibration(**{**data, "matmuls": tables, "curves": curves, "nccl": nccl})


def _refused(path: Path, why: str) -> UserError:
    return UserError(Problem(f"the calibration {why}, and is not used", _AGAIN, file=str(path)))


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
