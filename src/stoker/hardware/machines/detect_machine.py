"""This machine, as a cluster of one node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

import psutil

from stoker.errors import Problem, UserError
from stoker.hardware.host_facts import control_group_limits
from stoker.hardware.machines.cluster import Cluster, cluster_of
from stoker.hardware.machines.device_catalogue import DeviceKind
from stoker.hardware.machines.device_names import device_kind
from stoker.hardware.measured.calibration import Calibration, kept_calibration
from stoker.hardware.measured.planner_correction import kept_corrections
from stoker.hardware.processor import available_cores, processor_name

UNMEASURED = "this machine was not calibrated: rates are the catalogue's, `stoker plan --calibrate` measures its own"
# Loopback sockets between processes of one host with gloo: GB/s and seconds, an order of magnitude.
LOOPBACK_GBS, LOOPBACK_LATENCY = 2.0, 50e-6


def this_machine(processes: int | None = None, *, devices: Sequence[int] | None = None) -> Cluster:
    """This machine's GPUs, or its processor, with their calibration where there is one.

    Args:
        processes: that each take a GPU (a launcher may let each see its own only), or a part of the processor's cores
            and memory. By default all GPUs that are seen, or one process.
        devices: numbers of the processes' GPUs; by default the first ones.
    """
    gpus = _visible_gpus()
    if devices is not None:
        gpus, processes = [gpus[number] for number in devices if number < len(gpus)] or gpus, len(devices)
    return _gpu_machine(gpus, processes) if gpus else this_processor(processes or 1)


def machines(processes: int, per_machine: int) -> Cluster:
    """Machines like this one, for ``processes`` in all.

    Raises:
        UserError: the machines would have different numbers of processes.
    """
    if processes % per_machine:
        message = f"{processes} processes cannot be divided equally among machines of {per_machine}"
        raise UserError(Problem(message, "start the same number on each machine"))
    return this_machine(per_machine).with_nodes(processes // per_machine)


def this_processor(processes: int = 1) -> Cluster:
    """Returns the processor, as one device for each process, with a part of its cores, rates and memory.

    A process has ``cores // processes`` threads, and at least one.
    """
    cores, memory = available_cores(), _memory_gib()
    threads = max(1, cores // processes)
    found, notes = _measured(processor_name(), threads)
    kind = _processor_kind(found, 1.0 if found else 1 / processes, memory / processes)
    cluster = Cluster(
        device=kind,
        per_node=processes,
        nodes=1,
        network_gbs=LOOPBACK_GBS,
        rails=1,
        network_latency_s=LOOPBACK_LATENCY,
        link_latency_s=LOOPBACK_LATENCY,
        host_memory_gib=memory,
        host_cores=cores,
        failures_per_gpu_hour=0.0,
        name="local",
        calibration=found,
        notes=notes,
    )
    return corrected(cluster)


def _memory_gib() -> float:
    """Returns GiB of the host, or those that the control group of the processes allows."""
    limit, _ = control_group_limits()
    total = psutil.virtual_memory().total
    return (total if limit is None else min(total, limit)) / 2**30


def _processor_kind(found: Calibration | None, share: float, memory_gib: float) -> DeviceKind:
    """Returns the processor's part of one process: as measured with its threads, or its fraction of the catalogue's."""
    kind = device_kind("cpu")
    peaks = {precision: tflops * share for precision, tflops in kind.peak_tflops.items()}
    bandwidth = kind.memory_gbs * share
    if found is not None:
        peaks = {table.precision: max(table.rate(n, n, n) for n in table.sizes) / 1e12 for table in found.matmuls}
        bandwidth = (found.bandwidth("copy") or bandwidth * 1e9) / 1e9
    return replace(
        kind, memory_gib=memory_gib, memory_gbs=bandwidth, peak_tflops=peaks, link_gbs=LOOPBACK_GBS, host_gbs=bandwidth
    )


def _gpu_machine(gpus: list[tuple[str, float]], processes: int | None) -> Cluster:
    """Returns a node of the first GPU's kind: its name, and the least GiB that the driver reports for one.

    Processes take the GPUs in their order: those from the first of another kind on are not counted.
    """
    name, _ = gpus[0]
    found, notes = _measured(name, 0)
    try:
        kind = device_kind(name)
    except UserError as error:
        if found is None:
            message = f"this machine's GPU, {name}, is not in the catalogue and has not been measured"
            raise UserError(Problem(message, "measure it with `stoker plan --calibrate`")) from error
        kind = _unknown_gpu(name, found)
    same = len(list(takewhile(lambda gpu: gpu[0] == name, gpus)))
    if same < len(gpus) and processes is None:
        notes = (*notes, f"only the first {same} of {len(gpus)} GPUs, which are {name}, are counted")
    same = processes or same
    memory = min(size for _, size in gpus[:same])
    host = _memory_gib()
    cluster = cluster_of(replace(kind, memory_gib=memory), gpus=same, per_node=same)
    return corrected(
        replace(
            cluster, name="local", host_memory_gib=host, host_cores=available_cores(), calibration=found, notes=notes
        )
    )


def corrected(cluster: Cluster) -> Cluster:
    """Returns the cluster with corrections learnt from finished runs, and a note of each."""
    cpu = cluster.device.is_cpu
    threads = max(1, cluster.host_cores // cluster.per_node) if cpu else 0
    try:
        kept = kept_corrections(processor_name() if cpu else cluster.device.name, threads)
    except UserError as error:
        return replace(cluster, notes=tuple(dict.fromkeys((*cluster.notes, *map(str, error.problems)))))
    date = cluster.calibration.date if cluster.calibration else None
    found = tuple(correction for correction in kept if correction.calibration == date)
    notes = tuple(f"{c.tuning} tuning in {c.precision} is corrected by the run {c.run} ({c.date})" for c in found)
    return replace(cluster, corrections=found, notes=tuple(dict.fromkeys((*cluster.notes, *notes))))


def kind_name(device: str) -> str:
    """Converts a vendor's name of a device to the catalogue's; returns unknown names unchanged."""
    try:
        kind = device_kind(device)
    except UserError:
        return device
    return device if kind.is_cpu else kind.name


def _unknown_gpu(name: str, found: Calibration) -> DeviceKind:
    """Returns a GPU that the catalogue lacks, from its measurements; its link is assumed to be PCIe."""
    kind = _processor_kind(found, 1.0, 0.0)
    to_host = found.bandwidth("to-host")
    host = to_host / 1e9 if to_host else kind.host_gbs
    return replace(kind, name=name, link="PCIe", link_gbs=host, host_gbs=host, source="measured")


def _measured(device: str, threads: int) -> tuple[Calibration | None, tuple[str, ...]]:
    """Returns the stored calibration of the device, and notes for the user."""
    try:
        found = kept_calibration(device, threads)
    except UserError as error:
        return None, tuple(str(problem) for problem in error.problems)
    return found, (f"rates are this machine's own, calibrated on {found.date}",) if found else (UNMEASURED,)


def _visible_gpus() -> list[tuple[str, float]]:
    """Name and GiB of each GPU; none without PyTorch."""
    try:
        import torch  # a plan for another machine must not wait for it
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [(gpu.name, gpu.total_memory / 2**30) for gpu in found]
