"""The hosts of a submission, as its record has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.cluster.record import Record
from stoker.cluster.ssh.host_file import Host, word_problem
from stoker.errors import UserError, reason_of
from stoker.sockets import LAST_PORT


def hosts_of_record(record: Record) -> list[Host]:
    """Returns the hosts of a submitted job.

    Raises:
        UserError: the record, which may come from another machine, has none that ssh could be given.
    """
    try:
        return [_host(values) for values in record.value("hosts")]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"the record of {record.name} is damaged: {reason_of(error)}") from error


def _host(values: Mapping[str, Any]) -> Host:
    """Returns the host of a submission's record.

    Raises:
        KeyError, TypeError, ValueError: they are not the values of a host, or ssh would misread one.
    """
    host = Host(**{**values, "slots": None if values["slots"] is None else tuple(map(int, values["slots"]))})
    for word in filter(None, (host.name or "-", host.user, host.address)):
        if why := word_problem(word):
            raise ValueError(why)
    if host.port is not None and (type(host.port) is not int or not 1 <= host.port <= LAST_PORT):
        raise ValueError(f"the port {host.port!r}")
    return host
