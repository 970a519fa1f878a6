"""Planners for torch.distributed.checkpoint: each chunk is written and read by its own offsets in the whole tensor.

DCP would take the offsets of sharded parameters from their DTensors, which do not know of tensor parallelism.
"""

from __future__ import annotations

from torch import Size, Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    STATE_DICT_TYPE,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from stoker.checkpoint.chunks import Chunk


class ChunkSaver(DefaultSavePlanner):
    """Writes ``Held`` chunks. A chunk on several processes is written by the one with the least to write."""

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = {name: chunks[0] for name, chunks in state_dict.items()}
        self.flatten_state_dict = False
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write(name, chunk) for name, chunk in self.state_dict.items()])
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Saves the first process' buffers, as DDP does: they may differ between data-parallel processes."""
        written: set[str] = set()
        plans = []
        for plan in all_plans:
            items = [item for item in plan.items if item.index.fqn not in written]
            written |= {item.index.fqn for item in items if item.index.fqn.startswith("buffer/")}
            plans.append(SavePlan(items))
        return super().create_global_plan(plans)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].tensor


class ChunkLoader(DefaultLoadPlanner):
    """Fills ``Held`` chunks; tensors that they have no part of are not read."""

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        return LoadPlan(
            [
                item
                for name, chunks in self.state_dict.items()
                for item in create_read_items_for_chunk_list(name, saved[name], [_box(chunk) for chunk in chunks])  # type: ignore[arg-type]
            ]
        )

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn][index.index].place()

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        index = read_item.dest_index
        self.state_dict[index.fqn][index.index].filled()


def _box(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=Size(chunk.offsets), sizes=chunk.tensor.shape)


def _write(name: str, chunk: Chunk) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(name, chunk.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_box(chunk),
            properties=TensorProperties.create_from_tensor(chunk.tensor),
            size=Size(chunk.shape),
        ),
    )
