"""Rows on parameter servers, as seen by a training process."""

from __future__ import annotations

import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from stoker.errors import RunFailed
from stoker.sparse.eviction_pass import EvictionPlan
from stoker.sparse.hashing import owners_of
from stoker.sparse.servers.server_connection import Address, Message
from stoker.sparse.servers.server_link import ServerLink, waiting
from stoker.sparse.servers.wire_format import arrays_of, dict_of, rows_of
from stoker.sparse.sparse_state import LazyColumn, LazyPart, TableState
from stoker.sparse.table_keys import NO_KEYS, Keys
from stoker.sparse.table_settings import TableSettings
from stoker.sparse.value_format import RowFormat

CONNECT = 3.0  # seconds within which a server is expected to accept a connection


def to_stderr(line: str) -> None:
    """Prints a line on standard error."""
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class RowServers:
    """The parameter servers of a model.

    Attributes:
        addresses: of all servers, in an order that all processes share.
        secret: shared by both sides.
        staleness: maximum number of steps that the rows of a lookup may be behind. 0: each lookup includes all steps
            before it, as if the trainers stored the rows themselves. 1 and more: trainers do not wait for each other's
            last steps.
        patience: timeout in seconds for a lost server to return.
        report: prints a line for people when a server is lost.
    """

    addresses: tuple[Address, ...]
    secret: bytes
    staleness: int = 0
    patience: float = 300.0
    report: Callable[[str], None] = to_stderr

    def unreachable(self) -> Iterator[str]:
        """Yields a line for each server to which a connection fails now."""
        for address in self.addresses:
            try:
                socket.create_connection(address, timeout=CONNECT).close()
            except OSError as error:
                name = "{}:{}".format(*address)
                yield f"the server of rows at {name} cannot be reached: {error}; {waiting(self.patience)}"


@dataclass(frozen=True)
class _Lookup:
    leaf: Tensor
    keys: Keys
    counts: np.ndarray


class ServedRows:
    """Rows that servers store, with the methods of `stoker.sparse.exchanged_rows.ExchangedRows`.

    Args:
        links: connections to all servers.
        layout: number of these tables' layout.
    """

    def __init__(
        self,
        tables: Sequence[TableSettings],
        servers: RowServers,
        links: Sequence[ServerLink],
        *,
        layout: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._tables, self._servers, self._links, self._layout = tuple(tables), servers, links, layout
        self._compute, self._width = RowFormat(tables[0].dtype, tables[0].width).compute, tables[0].width
        self._rank, self._trainers = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
        self._group, self.plans_evictions = group, self._rank == 0
        self._lookups: list[_Lookup] = []
        self._waits = [False] * len(links)  # whether each server's lookups wait for its disk
        self._losses: list[int] = []  # losses of this process' servers before rows were loaded
        self._decided = 0  # steps taken or skipped in this run, by which messages are numbered
        self.step = 0

    def rows(self, keys: Keys, *, training: bool) -> tuple[Tensor, np.ndarray]:
        """Returns the unique rows, and the index of each key's row among them."""
        inverse, counts, keys = keys.deduplicated()
        least = max(0, self._decided - self._servers.staleness) if training else self._decided
        owners = owners_of(keys.hashes, len(self._links))
        places = [np.flatnonzero(owners == number) for number in range(len(self._links))]
        for link, mine in zip(self._links, places, strict=True):
            link.ask(self._about("values", least=least, training=training), [keys.ids[mine], keys.tables[mine]])
        leaf = torch.empty(len(keys), self._width, dtype=self._compute)
        for number, (link, mine) in enumerate(zip(self._links, places, strict=True)):
            header, (values,) = link.answer()
            leaf[torch.from_numpy(mine)], self._waits[number] = torch.from_numpy(values), header["waits"]
        if training and torch.is_grad_enabled():
            self._lookups.append(_Lookup(leaf.requires_grad_(), keys, counts))
        return leaf, inverse

    def prefetch(self, keys: Keys) -> None:
        """Requests rows from servers whose lookups wait for their disks. Requests to lost servers are not repeated."""
        if not any(self._waits):
            return
        keys = keys.deduplicated()[2]
        owners = owners_of(keys.hashes, len(self._links))
        for number in np.flatnonzero(self._waits).tolist():
            mine = np.flatnonzero(owners == number)
            self._links[number].hint(self._about("prefetch"), [keys.ids[mine], keys.tables[mine]])

    def gradients_are_finite(self) -> bool:
        """Returns whether the gradients of this process' lookups are finite.

        No server is asked: a server that is lost and waits for the pushes of all trainers would not get those of a
        trainer that waits elsewhere for another one.
        """
        grads = (some.leaf.grad for some in self._lookups)
        return all(bool(grad.isfinite().all()) for grad in grads if grad is not None)

    def apply(self, *, scale: float, lr_factor: float) -> None:
        """Has the servers update rows, and ends the step."""
        self._commit(scale, lr_factor)
        self.step += 1

    def candidates(self, what: str, arrays: list[np.ndarray]) -> np.ndarray:
        """Returns the sum of all servers' answers."""
        for link in self._links:
            link.ask(self._about("candidates", what=what, least=self._decided), arrays)
        return np.sum([link.answer()[1][0] for link in self._links], axis=0)

    def evict(self, plan: EvictionPlan | None) -> None:
        """Evicts rows on the servers, in a separate step of theirs; the first process sends the plan.

        The others wait until every server has made the steps before: one that is lost while the first process plans
        needs their messages as well.
        """
        if not self.plans_evictions:
            self._wait_for_servers()
        self._commit(None, 1.0, plan)

    def evicted(self) -> np.ndarray:
        """Returns the totals of evicted rows of each table."""
        self._links[0].ask(self._about("evicted", least=self._decided))
        return self._links[0].answer()[1][0]

    def discard(self) -> None:
        """Has the servers drop the step's gradients, without ending the step."""
        self._commit(None, 1.0)

    def rebase(self, step: int | None, *, by: str) -> None:
        """Sets the step from which incremental states start, on the servers that this process saves for."""
        for link in self._own_links():
            link.ask(self._about("rebase", base=step, by=by, least=self._decided))
            link.answer()

    def state(
        self, since: int | None, *, rows: int | None = None, is_base: bool = True
    ) -> Iterator[tuple[str, TableState]]:
        """Returns the state of the servers that this process saves for."""
        self._wait_for_servers()
        for link in self._own_links():
            message = self._about("state", since=since, rows=rows or 2**40, least=self._decided, is_base=is_base)
            for answer, arrays in link.answers(message):
                yield answer["name"], rows_of(arrays)

    def lazy_parts(self, since: int | None, *, rows: int, is_base: bool) -> Iterator[LazyPart]:
        """Yields the parts of the servers that this process saves for, each held in memory once received."""
        for name, table in self.state(since, rows=rows, is_base=is_base):
            yield LazyPart(name, {part.name: LazyColumn.of(getattr(table, part.name)) for part in fields(table)})

    def load(self, name: str, state: TableState, *, step: int) -> None:
        """Sends rows to the servers that this process loads for."""
        self.step = step
        self._losses = self._losses or [link.losses for link in self._own_links()]
        for link in self._own_links():
            link.ask(self._about("load", name=name, step=step), arrays_of(state))
            link.answer()

    def end_load(self) -> None:
        """Waits until every process has loaded its part."""
        for link in self._own_links():
            link.ask(self._about("snapshot"))
            link.answer()
        if self._losses and self._losses != [link.losses for link in self._own_links()]:
            raise RunFailed("a server of rows was lost while rows were being loaded")  # rows not yet on disk are lost
        self._losses = []
        if self._group is not None:
            dist.barrier(self._group)

    def counts(self) -> dict[str, int]:
        """Returns the number of rows of each table on the servers that this process saves for."""
        total = {table.name: 0 for table in self._tables}
        for link in self._own_links():
            link.ask(self._about("counts"))
            for name, count in link.answer()[0]["counts"].items():
                total[name] += count
        return total

    def _wait_for_servers(self) -> None:
        """Waits until every server has logged every step.

        A server that is lost afterwards does not need the other trainers, which may be waiting for this one.
        """
        nothing = np.empty(0, np.int64)
        for link in self._links:
            link.ask(self._about("values", least=self._decided, training=False), [nothing, nothing])
        for link in self._links:
            link.answer()

    def _own_links(self) -> list[ServerLink]:
        return list(self._links[self._rank :: self._trainers])

    def _about(self, kind: str, **more: object) -> Message:
        return {"kind": kind, "layout": self._layout, **more}

    def _push(self) -> None:
        """Sends this step's gradients."""
        grads = [torch.zeros_like(some.leaf) if some.leaf.grad is None else some.leaf.grad for some in self._lookups]
        if len(self._lookups) == 1:
            keys, counts, total = self._lookups[0].keys, self._lookups[0].counts, grads[0]
        else:  # none, or several
            seen = np.concatenate([np.empty(0, np.int64), *(some.counts for some in self._lookups)])
            every = Keys.concatenated([NO_KEYS, *(some.keys for some in self._lookups)])
            inverse, counts, keys = every.deduplicated(seen)
            total = torch.zeros(len(keys), self._width, dtype=self._compute)
            total.index_add_(0, torch.from_numpy(inverse), torch.cat([total[:0], *grads]))
        owners = owners_of(keys.hashes, len(self._links))
        for number, link in enumerate(self._links):
            mine = np.flatnonzero(owners == number)
            arrays = [keys.ids[mine], keys.tables[mine], counts[mine], total[torch.from_numpy(mine)].numpy()]
            link.tell(self._about("push", step=self._decided), arrays)
        self._lookups.clear()

    def _commit(self, scale: float | None, lr_factor: float, plan: EvictionPlan | None = None) -> None:
        self._push()
        arrays = [plan.below, plan.evicted] if plan is not None else []
        for link in self._links:
            link.tell(self._about("commit", step=self._decided, scale=scale, lr_factor=lr_factor), arrays)
        self._decided += 1


def served_rows(
    layouts: Sequence[Sequence[TableSettings]], servers: RowServers, *, seed: int, group: dist.ProcessGroup | None
) -> list[ServedRows]:
    """Begins a run on the servers; returns its rows by layout. A collective.

    Raises:
        RunFailed: a server cannot be reached.
    """
    rank, trainers = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
    token = torch.frombuffer(bytearray(secrets.token_bytes(16)), dtype=torch.uint8)
    if group is not None:
        dist.broadcast(token, group=group, group_src=0)
    run = {
        "name": token.numpy().tobytes().hex(),
        "seed": seed,
        "servers": len(servers.addresses),
        "trainers": trainers,
        "layouts": [[dict_of(table) for table in tables] for tables in layouts],
    }
    links = [
        ServerLink(
            address, servers.secret, {"run": {**run, "number": at}, "trainer": rank}, servers.patience, servers.report
        )
        for at, address in enumerate(servers.addresses)
    ]
    return [ServedRows(tables, servers, links, layout=n, group=group) for n, tables in enumerate(layouts)]
