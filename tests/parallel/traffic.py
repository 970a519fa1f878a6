"""Counts what collectives move, as they run: autograd's, DDP's, FSDP2's, the pipeline's and anybody's else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from volume import Flow, Volume

# Operator -> (kind, which argument holds the whole tensors; None: the result does).
_C10D: dict[str, tuple[str, int | None]] = {
    "allreduce_": ("all-reduce", 0),
    "allreduce_coalesced_": ("all-reduce", 0),
    "allgather_": ("all-gather", 0),
    "allgather_coalesced_": ("all-gather", 0),
    "_allgather_base_": ("all-gather", 0),
    "allgather_into_tensor_coalesced_": ("all-gather", 0),
    "reduce_scatter_": ("reduce-scatter", 1),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "alltoall_": ("all-to-all", 1),
    "alltoall_base_": ("all-to-all", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 0),
    "send": ("send", 0),
    "recv_": ("receive", 0),
    "recv_any_source_": ("receive", 0),
    "barrier": ("barrier", 0),
    "monitored_barrier_": ("barrier", 0),
}
_FUNCTIONAL: dict[str, tuple[str, int | None]] = {
    "all_reduce": ("all-reduce", 0),
    "all_reduce_": ("all-reduce", 0),
    "all_reduce_coalesced": ("all-reduce", 0),
    "all_reduce_coalesced_": ("all-reduce", 0),
    "all_gather_into_tensor": ("all-gather", None),
    "all_gather_into_tensor_out": ("all-gather", None),
    "all_gather_into_tensor_coalesced": ("all-gather", None),
    "reduce_scatter_tensor": ("reduce-scatter", 0),
    "reduce_scatter_tensor_out": ("reduce-scatter", 0),
    "reduce_scatter_tensor_coalesced": ("reduce-scatter", 0),
    "all_to_all_single": ("all-to-all", 0),
    "shard_dim_alltoall": ("all-to-all", 0),
    "broadcast": ("broadcast", 0),
    "broadcast_": ("broadcast", 0),
}
_SILENT = ("wait_tensor", "_wrap_tensor_autograd")  # they move nothing
_KINDS = {"c10d": _C10D, "_c10d_functional": _FUNCTIONAL, "_dtensor": _FUNCTIONAL}


class Traffic(TorchDispatchMode):
    """Within the block, adds up the collectives that this process takes part in.

    It sees every collective at torch's dispatcher, below whoever starts it; the backward pass is seen on every device,
    as autograd's threads inherit the mode. An operator without an entry above is kept under its own name.

    Example:
        >>> with Traffic(mesh.groups) as traffic:
        ...     loss().backward()
        >>> traffic.volumes[Flow("tensor", "all-reduce")].size

    Attributes:
        volumes: what has been moved.
    """

    def __init__(self, groups: Mapping[Any, dist.ProcessGroup | None]) -> None:
        """
        Args:
            groups: by axis. A group outside of them goes to the first axis with the same processes, or else under the
                name of its processes: ``ranks 0 1``.
        """
        super().__init__()
        self.volumes: dict[Flow, Volume] = {}
        present = {str(axis): group for axis, group in groups.items() if group is not None}
        self._by_name = {group.group_name: axis for axis, group in reversed(present.items())}
        self._by_ranks = {_ranks(group): axis for axis, group in reversed(present.items())}

    def __torch_dispatch__(
        self, operator: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        result = operator(*arguments, **(options or {}))
        kinds = _KINDS.get(operator.namespace)
        name = operator.__name__.split(".")[0]
        if kinds is None or name in _SILENT:
            return result
        kind, whole = kinds.get(name, (name, 0))
        flow = Flow(self._axis(arguments), kind)
        moved = 0 if kind == "barrier" else _nbytes(result if whole is None else arguments[whole])
        self.volumes[flow] = self.volumes.get(flow, Volume(0, 0)) + Volume(1, moved)
        return result

    def _axis(self, arguments: tuple[Any, ...]) -> str:
        """Its group is the operator's only script object; functional ones name it in their last argument."""
        boxed = next((a for a in arguments if isinstance(a, torch.ScriptObject)), None)
        last = arguments[-1]
        if boxed is not None:
            group = dist.ProcessGroup.unbox(boxed)
        else:
            group = last if isinstance(last, dist.ProcessGroup) else dist.distributed_c10d._resolve_process_group(last)
        ranks = _ranks(group)
        return self._by_name.get(group.group_name) or self._by_ranks.get(ranks) or f"ranks {' '.join(map(str, ranks))}"


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _nbytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.nbytes
    return sum(map(_nbytes, tensors)) if isinstance(tensors, (list, tuple)) else 0
