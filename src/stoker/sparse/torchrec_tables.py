"""TorchRec's tables with their fused optimizer, in one process or placed on several.

Importing this file imports TorchRec.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.distributed import DistributedModelParallel, collective_utils
from torchrec.distributed.comm_ops import set_gradient_division
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim import RowWiseAdagrad

from stoker.sparse.fused_tables import Feature
from stoker.sparse.hashing import salt_of
from stoker.sparse.table_settings import TableSettings

MULTIPLE = 4  # numbers of FBGEMM's rows


@dataclass(frozen=True)
class LocalTable:
    """A table of this process.

    Attributes:
        repeats: number of copies of each row's values in the kernel's row, one after the other.
    """

    name: str
    repeats: int
    _weight: Tensor
    _moment: Tensor | None

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._weight)

    @property
    def values(self) -> Tensor:
        """The values of the rows, [rows, width]."""
        return self._weight[:, : self._weight.shape[1] // self.repeats]

    @property
    def moment(self) -> Tensor:
        """The optimizer's sums of squares [rows, columns]."""
        if self._moment is None:
            return self._weight[:, :0]
        columns = self._moment.shape[1]
        return self._moment if columns == 1 else self._moment[:, : columns // self.repeats]

    @torch.no_grad()
    def write(self, at: Tensor, values: Tensor, moment: Tensor | None = None) -> None:
        """Sets rows.

        Args:
            at: int64 [n].
            values: [n, width].
            moment: [n, columns].
        """
        at = at.to(self._weight.device)
        self._weight[at] = values.to(self._weight).repeat(1, self.repeats)
        if moment is not None and self._moment is not None:
            times = 1 if self._moment.shape[1] == 1 else self.repeats
            self._moment[at] = moment.to(self._moment).repeat(1, times)


class TorchRecTables:
    """TorchRec's `FusedEmbeddingBagCollection`; with several processes `DistributedModelParallel`, whole tables in
    turn.

    Rows are updated by the backward pass of `look_up`'s result.

    TorchRec divides gradients by the number of processes by default, by a global switch of the
    process (`torchrec.distributed.comm_ops`): it is off once such tables are made.

    Every table requests the fused kernel by name. If a plan leaves the kernel open, TorchRec takes the dense one on a
    CPU, which leaves the update to the caller: such tables would silently never be trained.

    FBGEMM's rows have a multiple of four numbers. Others are repeated, and get the same gradient each time:
    they stay equal, and so does the mean of squares of row-wise Adagrad.

    Args:
        tables: with one optimizer.
        features: by name, in the order of their tables.
        rows: of each table.
        group: all processes of the default group, or None for one process.
    """

    def __init__(
        self,
        tables: Sequence[TableSettings],
        features: Mapping[str, Feature],
        *,
        rows: Mapping[str, int],
        seed: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.repeats = {table.name: _repeats(table.width) for table in tables}
        self._names = {_own_name(number): table.name for number, table in enumerate(tables)}
        self._device, self._order = device, list(features)
        configs = [
            EmbeddingBagConfig(
                name=_own_name(number),
                embedding_dim=table.width * _repeats(table.width),
                num_embeddings=rows[table.name],
                feature_names=[name for name, feature in features.items() if feature.table == table.name],
                pooling=PoolingType.SUM,
            )
            for number, table in enumerate(tables)
        ]
        kind, more = _optimizer(tables[0])
        if group is None:
            self._model = FusedEmbeddingBagCollection(configs, kind, more, is_weighted=True, device=device)
        else:
            self._model = _placed(configs, kind, more, device, group)
        self._optimizer = self._model.fused_optimizer if group is not None else self._model.fused_optimizer()
        self._rate = tables[0].lr
        if group is not None:
            self._check_fused()
        settings = {table.name: table for table in tables}
        for local in self.local():
            local.write(torch.arange(len(local)), first_values(settings[local.name], len(local), seed))

    def look_up(
        self, rows: Sequence[Tensor], lengths: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """Returns weighted sums [batch, width x repeats] of rows, by feature. A collective.

        Args:
            rows, lengths, weights: for each feature, row numbers [n], rows of each sample [batch], and factors [n].
        """
        keyed = KeyedJaggedTensor(
            keys=self._order,
            values=torch.cat(list(rows)).to(self._device),
            weights=torch.cat(list(weights)).to(self._device),
            lengths=torch.cat(list(lengths)).to(self._device, torch.int32),
        )
        with torch.autocast(self._device.type, enabled=False):
            found: dict[str, Tensor] = self._model(keyed).to_dict()
        return found

    def set_rate(self, factor: float) -> None:
        """Sets the learning rate of later updates, as a factor of the tables' own."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * factor
        self._optimizer.zero_grad()  # which passes the settings to FBGEMM's kernels

    def local(self) -> Iterator[LocalTable]:
        """Yields the tables of this process."""
        states = {key.split(".")[-2]: state for key, state in self._optimizer.state_dict()["state"].items()}
        for key, weight in self._model.state_dict().items():
            own = key.split(".")[1]
            values = _here(weight)
            if values is None:
                continue
            moments = [
                m for name, m in states.get(own, {}).items() if name.split(".")[-1] in ("momentum1", "momentum_1")
            ]
            moment = _here(moments[0]) if moments else None
            if moment is not None and moment.numel() not in (len(values), values.numel()):
                moment = None  # SGD has a placeholder
            name, columns = self._names[own], None if moment is None else moment.view(len(values), -1)
            yield LocalTable(name, self.repeats[name], values, columns)

    def _check_fused(self) -> None:
        """Checks that every table of this process has a fused optimizer."""
        fused = {key.split(".")[-2] for key in self._optimizer.params}
        here = {key.split(".")[1] for key, weight in self._model.state_dict().items() if _here(weight) is not None}
        if left := sorted(self._names[own] for own in here - fused):
            raise RuntimeError(f"TorchRec would never train table {left[0]!r}: it has no fused optimizer")


def first_values(table: TableSettings, rows: int, seed: int) -> Tensor:
    """Returns values uniform between minus and plus the table's scale, [rows, width]; a function of seed and table."""
    generator = torch.Generator().manual_seed(int(salt_of("first values", seed, table.name) >> np.uint64(1)))
    return (torch.rand(rows, table.width, generator=generator) * 2 - 1) * table.init_scale


def _placed(configs: list[Any], kind: Any, more: dict[str, Any], device: torch.device, group: dist.ProcessGroup) -> Any:
    """Returns the tables, each whole on one process."""
    set_gradient_division(False)
    collective_utils._INITIALIZED = False  # else only processes that ask for the first time take part in that
    world = dist.get_world_size(group)
    collection = EmbeddingBagCollection(tables=configs, is_weighted=True)
    for config in configs:
        _apply_optimizer_in_backward(kind, [collection.embedding_bags[config.name].weight], dict(more))
    sharder = EmbeddingBagCollectionSharder()
    placed = {
        config.name: table_wise(rank=number % world, compute_kernel="fused") for number, config in enumerate(configs)
    }
    on_host = min(world, torch.cuda.device_count()) if device.type == "cuda" else world
    plan = construct_module_sharding_plan(
        collection, placed, sharder, world_size=world, local_size=on_host, device_type=device.type
    )
    return DistributedModelParallel(
        collection,
        env=ShardingEnv.from_process_group(group),
        device=device,
        plan=ShardingPlan({"": plan}),
        sharders=[sharder],
    )


def _here(tensor: Any) -> Tensor | None:
    """Returns this process' part of a tensor."""
    if not hasattr(tensor, "local_shards"):
        return tensor.detach()
    shards = tensor.local_shards()
    return shards[0].tensor.detach() if shards else None


def _repeats(width: int) -> int:
    """Returns the number of repetitions of a row, so that its length is a multiple of four."""
    return math.lcm(width, MULTIPLE) // width


def _own_name(number: int) -> str:
    """Returns the table's name in TorchRec: a name of the user's could be that of a method of `nn.ModuleDict`."""
    return f"table{number}"


def _optimizer(table: TableSettings) -> tuple[Any, dict[str, Any]]:
    """Returns FBGEMM's class of an optimizer, and its arguments."""
    kinds = {"rowwise_adagrad": RowWiseAdagrad, "adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}
    eps = {} if table.optimizer == "sgd" else {"eps": table.eps}
    return kinds[table.optimizer], {"lr": table.lr, "weight_decay": table.weight_decay, **eps}
