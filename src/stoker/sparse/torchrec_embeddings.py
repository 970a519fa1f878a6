"""The same module with TorchRec's tables, whose kernels run on GPUs too: a fixed number of rows for any ids."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stoker.errors import CannotRun, Problem, UserError, reason_of
from stoker.sparse.fused_tables import Feature
from stoker.sparse.hashing import hashes_of, salt_of
from stoker.sparse.jagged_ids import JaggedIds
from stoker.sparse.sparse_state import SparseState, TableState
from stoker.sparse.table_settings import TableSettings

_OPTIMIZERS = {"rowwise_adagrad": "RowWiseAdagrad", "adagrad": "Adagrad", "sgd": "SGD"}
_INSTALL = (
    "install the pair that fits torch 2.13: `pip install fbgemm-gpu-cpu==1.8.0 tensordict torchmetrics==1.0.3 tqdm "
    "pyre-extensions iopath` (or fbgemm-gpu==1.8.0), then `pip install --no-deps torchrec==1.8.0`"
)


class TorchRecEmbeddings(nn.Module):
    """As `SparseEmbeddings`, on TorchRec's `EmbeddingBagCollection` under `DistributedModelParallel`.

    An id's row is its hash modulo the rows of its table: ids may collide. Tables are placed whole on one process each,
    in turn. TorchRec updates rows within the backward pass, so that there is one backward pass a step, gradients are
    summed over processes, and neither scaling nor `discard` is possible after it.

    TorchRec divides gradients by the number of processes unless it is told not to, which is a switch of the whole
    process (`torchrec.distributed.comm_ops`): it is off once these tables are made.

    Every table has the fused kernel by name. Where a plan leaves the kernel open, TorchRec takes the dense one on a
    CPU, which leaves the update to somebody else: such tables would silently never be trained.

    Args:
        rows: of each table.
        group: must be the default group, with one process or more.

    Raises:
        CannotRun: TorchRec is not there, or does not fit torch.
        UserError: a setting that TorchRec has no counterpart for.
    """

    def __init__(
        self,
        tables: Sequence[TableSettings],
        features: Mapping[str, Feature],
        *,
        rows: Mapping[str, int],
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        _refuse(tables, features, rows)
        parts = _import()
        parts["set_gradient_division"](False)
        self._parts, self._rows = parts, dict(rows)
        self._names = {_own_name(number): table.name for number, table in enumerate(tables)}
        self._device, self._features = torch.device(device), dict(features)
        self._salts = {table.name: salt_of("index", table.name) for table in tables}
        world = dist.get_world_size()
        configs = [
            parts["EmbeddingBagConfig"](
                name=_own_name(number),
                embedding_dim=table.width,
                num_embeddings=rows[table.name],
                feature_names=[name for name, feature in features.items() if feature.table == table.name],
                pooling=getattr(parts["PoolingType"], _pooling(table.name, features).upper()),
                init_fn=_initial(table, seed),
            )
            for number, table in enumerate(tables)
        ]
        self._order = [name for config in configs for name in config.feature_names]
        collection = parts["EmbeddingBagCollection"](tables=configs)
        for number, table in enumerate(tables):
            more = {} if table.optimizer == "sgd" else {"eps": table.eps}
            weight = collection.embedding_bags[_own_name(number)].weight
            kind = getattr(parts["optim"], _OPTIMIZERS[table.optimizer])
            parts["apply"](kind, [weight], {"lr": table.lr, "weight_decay": table.weight_decay, **more})
        sharder = parts["EmbeddingBagCollectionSharder"]()
        placed = {
            _own_name(number): parts["table_wise"](rank=number % world, compute_kernel="fused")
            for number, table in enumerate(tables)
        }
        plan = parts["construct_module_sharding_plan"](
            collection, placed, sharder, world_size=world, local_size=world, device_type=self._device.type
        )
        self._model = parts["DistributedModelParallel"](
            collection, device=self._device, plan=parts["ShardingPlan"]({"": plan}), sharders=[sharder]
        )
        self._step = 0
        self._rates = {id(group): group["lr"] for group in self._groups()}

    @property
    def version(self) -> int:
        """Steps that have ended."""
        return self._step

    @property
    def rows(self) -> dict[str, int]:
        """Rows of each table."""
        return dict(self._rows)

    def forward(self, ids: Mapping[str, JaggedIds]) -> dict[str, Tensor]:
        """Pooled rows of each feature's ids, [batch, width]. A collective."""
        values, lengths = [], []
        for name in self._order:
            table = self._features[name].table
            hashes = hashes_of(np.ascontiguousarray(ids[name].ids.numpy()), self._salts[table])
            values.append(torch.from_numpy((hashes % np.uint64(self._rows[table])).view(np.int64)))
            lengths.append(ids[name].lengths.to(torch.int32))
        keyed = self._parts["KeyedJaggedTensor"].from_lengths_sync(
            keys=self._order, values=torch.cat(values).to(self._device), lengths=torch.cat(lengths).to(self._device)
        )
        found = self._model(keyed).to_dict()
        return {name: found[name] for name in self._features}

    def apply_gradients(self, *, scale: float = 1.0, lr_factor: float = 1.0) -> None:
        """Ends the step, whose update was made by the backward pass.

        Args:
            lr_factor: holds from the next step on.

        Raises:
            ValueError: gradients are to be scaled.
        """
        if scale != 1:
            raise ValueError("TorchRec has updated its rows in the backward pass: gradients cannot be scaled after it")
        for group in self._groups():
            group["lr"] = self._rates[id(group)] * lr_factor
        self._step += 1

    def discard(self) -> None:
        """Nothing: an update that the backward pass has made stays. The step has not ended."""

    def end_empty_steps(self, until: int) -> None:
        """Counts steps without lookups, until ``until`` steps have ended."""
        self._step = max(self._step, until)

    def gradient_norm(self) -> float:
        """0: the gradients of rows are not kept."""
        return 0.0

    def prefetch(self, ids: Mapping[str, JaggedIds]) -> None:
        """Nothing: all rows are in the device's memory."""

    def state(self, since: int | None = None) -> SparseState:
        """The rows of this process' tables; an id is the number of a row.

        Raises:
            ValueError: an incremental state is asked for.
        """
        if since is not None:
            raise ValueError("TorchRec does not know which rows have changed")
        tables = {}
        for name, values, moment in self._local():
            width = moment[:, :0] if moment is not None else torch.empty(len(values), 0)
            optimizer = width if moment is None else moment
            zeros = torch.zeros(len(values), dtype=torch.int32)
            ids = torch.arange(len(values))
            tables[name] = TableState(ids, values.cpu().clone(), optimizer.cpu().clone(), zeros, zeros)
        return SparseState(self._step, None, tables)

    def parts(self, since: int | None = None, *, rows: int = 2**20) -> Iterator[SparseState]:
        """The same as `state`, table by table."""
        whole = self.state(since)
        for name, table in whole.tables.items():
            yield SparseState(whole.step, since, {name: table})

    def load(self, parts: Iterable[SparseState]) -> None:
        """Takes over states of the same tables.

        Raises:
            ValueError: a table has another number of rows.
        """
        own = {name: (values, moment) for name, values, moment in self._local()}
        for part in parts:
            self._step = part.step
            for name, table in part.tables.items():
                if name not in own:
                    continue
                values, moment = own[name]
                if table.values.shape != values.shape:
                    found = f"{tuple(table.values.shape)}, and this job's have {tuple(values.shape)}"
                    raise ValueError(f"the rows of table {name!r} are {found}")
                values.copy_(table.values)
                if moment is not None:
                    moment.copy_(table.optimizer.view_as(moment))

    def _groups(self) -> list[dict[str, Any]]:
        return list(self._model.fused_optimizer.param_groups)

    def _local(self) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """Each table of this process: its name, its values, and the optimizer's first moment [rows, columns]."""
        states = self._model.fused_optimizer.state_dict()["state"]
        for key, sharded in self._model.state_dict().items():
            own = key.split(".")[1]
            shards = sharded.local_shards()
            if not shards:
                continue
            moments = states.get(key, {}).get(f"{own}.momentum1")
            moment = moments.local_shards()[0].tensor if moments is not None else None
            name = self._names[own]
            yield name, shards[0].tensor, None if moment is None else moment.view(len(moment), -1)


def _own_name(number: int) -> str:
    """What TorchRec calls a table: any name of the user's could be that of a method of `nn.ModuleDict`."""
    return f"table{number}"


def _initial(table: TableSettings, seed: int) -> Any:
    """Fills a weight with first values that depend on seed and table alone."""

    def fill(weight: Tensor) -> None:
        generator = torch.Generator().manual_seed(int(salt_of("first values", seed, table.name) >> np.uint64(1)))
        first = torch.rand(weight.shape, generator=generator) * 2 - 1
        with torch.no_grad():
            weight.copy_(first * table.init_scale)

    return fill


def _pooling(table: str, features: Mapping[str, Feature]) -> str:
    return next(feature.pooling for feature in features.values() if feature.table == table)


def _refuse(tables: Sequence[TableSettings], features: Mapping[str, Feature], rows: Mapping[str, int]) -> None:
    """Names everything that TorchRec cannot do."""
    problems = []
    for table in tables:
        used = {feature.pooling for feature in features.values() if feature.table == table.name}
        if len(used) != 1 or used == {"none"}:
            found = " and ".join(sorted(used)) or "no features"
            problems.append(Problem(f"table {table.name!r} has {found}: TorchRec pools a table's features alike"))
        for name in ("admission", "eviction", "disk"):
            if getattr(table, name) is not None:
                problems.append(Problem(f"table {table.name!r} has {name}, which TorchRec's tables have not"))
        if table.optimizer not in _OPTIMIZERS or table.initial:
            named = table.optimizer if table.optimizer not in _OPTIMIZERS else "an initial accumulator"
            problems.append(Problem(f"table {table.name!r} has {named}", f"take one of {', '.join(_OPTIMIZERS)}"))
        if table.dtype != "float32":
            problems.append(Problem(f"table {table.name!r} has {table.dtype} rows", "take float32"))
        if not math.isfinite(rows.get(table.name, 0)) or rows.get(table.name, 0) < 1:
            problems.append(Problem(f"table {table.name!r} has no number of rows", "state how many it has"))
    if problems:
        raise UserError(*problems)


def _import() -> dict[str, Any]:
    try:
        from torch.distributed.optim import _apply_optimizer_in_backward as apply
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType, optim
        from torchrec.distributed import DistributedModelParallel
        from torchrec.distributed.comm_ops import set_gradient_division
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
        from torchrec.distributed.types import ShardingPlan
    except (ImportError, OSError, AttributeError) as error:  # a pair that does not match fails in its libraries
        raise CannotRun(Problem(f"TorchRec cannot be loaded: {reason_of(error)}", _INSTALL)) from error
    return {
        "optim": optim,
        "apply": apply,
        "EmbeddingBagCollection": EmbeddingBagCollection,
        "EmbeddingBagConfig": EmbeddingBagConfig,
        "KeyedJaggedTensor": KeyedJaggedTensor,
        "PoolingType": PoolingType,
        "DistributedModelParallel": DistributedModelParallel,
        "EmbeddingBagCollectionSharder": EmbeddingBagCollectionSharder,
        "construct_module_sharding_plan": construct_module_sharding_plan,
        "table_wise": table_wise,
        "ShardingPlan": ShardingPlan,
        "set_gradient_division": set_gradient_division,
    }
