"""Memory faults and throttling of a GPU, as NVIDIA's driver counts them.

Source: NVIDIA, "GPU Memory Error Management" (docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt): new processes may use a
GPU whose rows are still to be remapped; one whose remapping failed is to be replaced.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker.hardware.process.program_output import program_output

SECONDS = 5.0  # that each query may take


@dataclass(frozen=True)
class GpuState:
    """The state of a GPU; empty texts for what is in order or unknown.

    Attributes:
        failed: the reason why it should not be used.
        notes: faults with which it can be used.
        throttled: why it is slow.
    """

    failed: str = ""
    notes: tuple[str, ...] = ()
    throttled: str = ""


def gpu_state(address: str) -> GpuState:
    """Asks `nvidia-smi` for the state of the GPU at a PCI address.

    Each query is separate, since a driver that does not know a field refuses the whole query.
    """
    errors = _query(address, "--query-gpu=ecc.errors.uncorrected.volatile.total")
    if errors is None:  # there is no such program, or the driver does not answer
        return GpuState()
    rows = _query(address, "--query-remapped-rows=remapped_rows.pending,remapped_rows.failure") or []
    slowdown = _query(address, "--query-gpu=clocks_event_reasons.hw_slowdown") or []
    pending, failed = (_is_set(rows, index) for index in range(2))
    notes = []
    if _is_set(errors, 0):
        notes.append(f"has {errors[0]} uncorrectable memory errors since its last reset")
    if pending:
        notes.append("has memory rows that are remapped at its next reset (`nvidia-smi -r`)")
    return GpuState(
        failed="has memory rows that could not be remapped; have it replaced" if failed else "",
        notes=tuple(notes),
        throttled="its clock is reduced because of temperature or power" if slowdown == ["Active"] else "",
    )


def _query(address: str, query: str) -> list[str] | None:
    """Returns the values of a query about one GPU; None if it is not answered."""
    output = program_output("nvidia-smi", f"--id={address}.0", query, "--format=csv,noheader,nounits", seconds=SECONDS)
    return [value.strip() for value in output.strip().split(",")] if output else None


def _is_set(values: list[str], index: int) -> bool:
    """Returns whether a value is a number above 0 or a yes; `[N/A]` is neither, as under MIG."""
    value = values[index].lower() if index < len(values) else ""
    return value == "yes" or (value.isascii() and value.isdigit() and int(value) > 0)
