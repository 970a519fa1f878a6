"""Hosts and their slots: lines of a host file in the format of MPI and DeepSpeed, and the selection among them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from stoker.errors import Problem, UserError, did_you_mean
from stoker.sockets import LAST_PORT

_LINE = re.compile(
    r"(?:(?P<user>[^\s@:]+)@)?(?P<name>\[[0-9A-Fa-f:]+\]|[^\s@:#=]+)(?::(?P<count>\d+))?(?P<rest>(?:\s+[\w-]+\s*=\s*\S+)*)"
)
_RANKFILE = re.compile(r"rank\s+\d+\s*=.*")  # of Open MPI
_PAIR = re.compile(r"([\w-]+)\s*=\s*(\S+)")
IGNORED = ("max_slots", "max-slots")  # of Open MPI: how far a host may be filled beyond its slots
KEYS = ("slots", "address", "port")
SSH_PORT, FIRST_FREE_PORT = 22, 1024  # numbers behind a colon that are ports rather than slots
# Names, users and jump hosts become words of an ssh command, which would read a leading hyphen as an option.
_WORD = re.compile(r"(?!-)[A-Za-z0-9._:@%\[\]\\+~=-]+")  # users may be as CORP\\me and me+node

Placed = Callable[[str, str], Problem]  # makes a problem at a line, of message and suggestion


@dataclass(frozen=True)
class Host:
    """A host.

    Attributes:
        name: as ssh knows it.
        user, port: where they differ from ssh's own.
        slots: numbers of the devices to use; None if the line does not give their number.
        chosen: whether slots were selected among others, so that the processes must see only these.
        address: at which the other hosts reach it; empty until it is determined.
    """

    name: str
    user: str = ""
    port: int | None = None
    slots: tuple[int, ...] | None = None
    chosen: bool = False
    address: str = ""


def parse_host(line: str, problem: Placed) -> Host:
    """Returns the host of a line: ``gpu1 slots=8``, ``me@gpu1 slots=8 address=10.0.0.1``, ``gpu1:8`` (MPICH).

    Raises:
        UserError: it is no such line.
    """
    written = line.split("#", maxsplit=1)[0].strip()
    if _RANKFILE.fullmatch(written):
        message = f"`{written}` is a line of Open MPI's rankfile, which places processes"
        raise UserError(problem(message, "write a host file: `gpu1 slots=8` for each host"))
    match = _LINE.fullmatch(written)
    if match is None:
        raise UserError(problem(f"`{line.strip()}` names no host", "write `gpu1 slots=8`"))
    values: dict[str, str] = {}
    for key, value in _PAIR.findall(match["rest"]):
        if key in IGNORED:
            continue
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            raise UserError(problem(f"`{key}=` is not known of a host", f"write `{near[0] if near else 'slots'}=`"))
        if key in values:
            raise UserError(problem(f"`{key}=` is written twice", "keep one of them"))
        values[key] = value
    count = _slot_count(match, values, problem)
    port = values.get("port")
    if port is not None and not (port.isdecimal() and 1 <= int(port) <= LAST_PORT):
        raise UserError(problem(f"`port={port}` is not a port from 1 to {LAST_PORT}", "write `port=22`"))
    name = match["name"]
    if "[" in name.removeprefix("["):
        raise UserError(problem(f"`{name}` names several hosts", "write a line for each"))
    for word in filter(None, (name, match["user"], values.get("address"))):
        if why := word_problem(word):
            raise UserError(problem(why, "write `gpu1 slots=8`, or `me@gpu1`"))
    return Host(
        name=name.strip("[]"),
        user=match["user"] or "",
        port=int(values["port"]) if "port" in values else None,
        slots=tuple(range(int(count))) if count else None,
        address=values.get("address", ""),
    )


def _slot_count(match: re.Match[str], values: Mapping[str, str], problem: Placed) -> str | None:
    """Returns the number of slots of a line; None if it does not give it."""
    if match["count"] is not None and "slots" in values:
        message = f"`:{match['count']}` and `slots={values['slots']}` both give the number of slots"
        raise UserError(problem(message, "keep one of them"))
    count = values.get("slots") or match["count"]
    if count is not None and (not count.isdecimal() or int(count) < 1):
        written = f"slots={count}" if "slots" in values else f":{count}"
        raise UserError(problem(f"`{written}` is not a number above 0", "write `slots=8`"))
    if match["count"] is not None and (int(count) == SSH_PORT or int(count) >= FIRST_FREE_PORT):
        message = f"`:{count}` is a number of slots, as in MPICH, and looks like a port"
        host = (f"{match['user']}@" if match["user"] else "") + match["name"]
        raise UserError(problem(message, f"write `{host} port={count}`, or `{host} slots={count}`"))
    return count


def word_problem(word: str) -> str:
    """Returns why a text cannot be a host, a user or a jump host of an ssh command; empty if it can."""
    if _WORD.fullmatch(word):
        return ""
    if word.startswith("-"):
        return f"`{word}` begins with a hyphen, and ssh would read it as an option"
    wrong = next(character for character in word if not _WORD.fullmatch(f"a{character}"))
    return f"`{word}` contains {wrong!r}, which is not allowed in a host or a user"


def parse_host_file(text: str, file: str) -> list[Host]:
    """Returns the hosts of a host file; a host of several lines has the slots of all of them.

    Raises:
        UserError: with the position of every invalid line; or the file has no hosts.
    """
    hosts: dict[str, Host] = {}
    problems: list[Problem] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.split("#")[0].strip():
            continue
        column = len(line) - len(line.lstrip()) + 1

        def at(message: str, hint: str, place: tuple[int, int] = (number, column)) -> Problem:
            return Problem(message, hint, file=file, line=place[0], column=place[1])

        try:
            host = parse_host(line, at)
        except UserError as error:
            problems += error.problems
            continue
        before = hosts.get(host.name)
        if before is not None:
            both = len(before.slots or (0,)) + len(host.slots or (0,))
            host = replace(before, slots=tuple(range(both)))
        hosts[host.name] = host
    if not hosts and not problems:
        problems = [Problem("no host is named", "write `gpu1 slots=8`", file=file, line=1, column=1)]
    if problems:
        raise UserError(*problems)
    return list(hosts.values())


def chosen_hosts(
    hosts: list[Host], *, include: str | None, exclude: str | None, include_at: Placed, exclude_at: Placed
) -> list[Host]:
    """Returns the hosts and slots that ``include`` and ``exclude`` select, in the order of the host file.

    Both are written as DeepSpeed has it: ``gpu1:0,2@gpu2`` is slots 0 and 2 of gpu1, and all of gpu2.

    Raises:
        UserError: a named host or slot does not exist, or none is left.
    """
    left = hosts
    if include is not None:
        taken = _parsed(include, hosts, include_at)
        left = [_with_slots(host, taken[host.name]) for host in hosts if host.name in taken]
    if exclude is not None:
        dropped = _parsed(exclude, left, exclude_at)
        for host in left:
            if host.slots is None and dropped.get(host.name) is not None:
                hint = f"write `{host.name} slots=8` where the hosts are named, or exclude all of {host.name}"
                raise UserError(exclude_at(f"{host.name} has no `slots=`, so none can be excluded", hint))
        left = [rest for host in left if (rest := _without(host, dropped)) is not None]
    if not left:
        raise UserError((include_at if exclude is None else exclude_at)("no host is left", "leave one"))
    return left


def _parsed(text: str, hosts: list[Host], problem: Placed) -> dict[str, tuple[int, ...] | None]:
    """Parses slots by host; None for all of them."""
    found: dict[str, tuple[int, ...] | None] = {}
    known = {host.name: host for host in hosts}
    parts = [part for part in re.split(r"[@\s;]+", text) if part]
    if not parts:
        raise UserError(problem("it names no host", f"write, for example, `{next(iter(known))}`, or remove it"))
    for part in parts:
        name, colon, numbers = part.partition(":")
        if name not in known:
            raise UserError(problem(f"there is no host {name}", _near(name, known)))
        if name in found:
            raise UserError(problem(f"{name} is named twice", f"name it once, with all its slots: `{name}:0,1`"))
        if not colon:
            found[name] = None
            continue
        slots = numbers.split(",")
        if not all(slot.isdecimal() for slot in slots):
            raise UserError(problem(f"`{part}` names no slots", f"write `{name}:0,2`"))
        if len({int(slot) for slot in slots}) < len(slots):
            raise UserError(problem(f"`{part}` names a slot twice", "name each slot once"))
        have = known[name].slots
        absent = [slot for slot in slots if have is not None and int(slot) not in have]
        if absent:
            last = max(have or (0,))
            raise UserError(problem(f"{name} has no slot {absent[0]}", f"its slots are 0 to {last}"))
        found[name] = tuple(int(slot) for slot in slots)
    return found


def _near(name: str, known: Iterable[str]) -> str:
    return did_you_mean(name, known, 0.6) or f"the hosts are {', '.join(known)}"


def _with_slots(host: Host, slots: tuple[int, ...] | None) -> Host:
    return host if slots is None else replace(host, slots=slots, chosen=True)


def _without(host: Host, dropped: dict[str, tuple[int, ...] | None]) -> Host | None:
    """Returns a host without its dropped slots; None if none is left."""
    if host.name not in dropped:
        return host
    slots = dropped[host.name]
    if slots is None:
        return None
    assert host.slots is not None
    left = tuple(slot for slot in host.slots if slot not in slots)
    return replace(host, slots=left, chosen=True) if left else None
