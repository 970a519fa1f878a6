"""The hosts of a block ``ssh``: of its list or its host file, as `include` and `exclude` leave them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from stoker.cluster.chosen_target import ChosenTarget
from stoker.cluster.ssh.host_file import Host, chosen_hosts, parse_host, parse_host_file
from stoker.errors import Problem, UserError
from stoker.job.document.text_file import read_text
from stoker.job.targets.ssh import SshBlock


def hosts_of_block(chosen: ChosenTarget, block: SshBlock) -> list[Host]:
    """Returns the hosts of a block; a host file is read.

    Raises:
        UserError: the hosts are not named, or wrongly, or `spares` leaves none of them to train.
    """
    if block.hosts and block.hostfile:
        raise UserError(chosen.problem("hostfile", "`hosts` and `hostfile` both name the hosts", "keep one of them"))
    hosts = chosen_hosts(
        _from_file(chosen, block.hostfile) if block.hostfile else _from_list(chosen, block),
        include=block.include,
        exclude=block.exclude,
        include_at=partial(chosen.problem, "include"),
        exclude_at=partial(chosen.problem, "exclude"),
    )
    if block.spares >= len(hosts):
        message = f"`spares: {block.spares}` leaves none of the {len(hosts)} hosts to train"
        raise UserError(chosen.problem("spares", message, "write fewer, or name more hosts"))
    return hosts


def key_of_host(block: SshBlock, host: Host) -> str:
    """Returns the key that names a host, with the index as it is written in the block."""
    if block.hostfile:
        return "hostfile"
    names = [parse_host(line, Problem).name for line in block.hosts]
    return f"hosts[{names.index(host.name)}]"


def _from_file(chosen: ChosenTarget, file: str) -> list[Host]:
    path = Path(file).expanduser()
    if not path.is_file():
        message = f"there is no host file {file}"
        raise UserError(chosen.problem("hostfile", message, "write `gpu1 slots=8` into it, a line for each host"))
    return parse_host_file(read_text(path), file)


def _from_list(chosen: ChosenTarget, block: SshBlock) -> list[Host]:
    if not block.hosts:
        raise UserError(chosen.problem("hosts", "no host is named", "write `hosts: [gpu1, gpu2]`, or a `hostfile`"))
    hosts: list[Host] = []
    problems: list[Problem] = []
    for index, line in enumerate(block.hosts):
        try:
            host = parse_host(line, partial(chosen.problem, f"hosts[{index}]"))
        except UserError as error:
            problems += error.problems
            continue
        if any(host.name == other.name for other in hosts):
            problems.append(chosen.problem(f"hosts[{index}]", f"{host.name} is named twice", "remove one"))
        hosts.append(host)
    if problems:
        raise UserError(*problems)
    return hosts
