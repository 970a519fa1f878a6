"""Host files of MPI and DeepSpeed, and which hosts and slots are taken."""

from __future__ import annotations

import pytest

from stoker.cluster.ssh.host_file import Host, chosen_hosts, parse_host, parse_host_file
from stoker.errors import Problem, UserError


def problem(message: str, hint: str) -> Problem:
    return Problem(message, hint)


def chosen(
    hosts: list[Host], include: str | None = None, exclude: str | None = None
) -> dict[str, tuple[int, ...] | None]:
    found = chosen_hosts(hosts, include=include, exclude=exclude, include_at=problem, exclude_at=problem)
    return {host.name: host.slots for host in found}


@pytest.mark.parametrize(
    ("line", "host"),
    [
        ("gpu1", Host("gpu1")),
        ("gpu1 slots=2", Host("gpu1", slots=(0, 1))),
        ("gpu1:2", Host("gpu1", slots=(0, 1))),  # MPICH
        ("rank slots=2", Host("rank", slots=(0, 1))),
        ("gpu1 slots=2 max_slots=4 # Open MPI", Host("gpu1", slots=(0, 1))),
        ("me@gpu1 port=2222 address=10.0.0.1", Host("gpu1", "me", 2222, address="10.0.0.1")),
        ("10.0.0.1 slots = 1", Host("10.0.0.1", slots=(0,))),
        ("me@[fe80::1]", Host("fe80::1", "me")),
    ],
)
def test_lines(line: str, host: Host) -> None:
    assert parse_host(line, problem) == host


def test_wrong_lines_are_named_by_place() -> None:
    with pytest.raises(UserError) as error:
        parse_host_file("# two\ngpu1 slots=2\n  gpu2 slot=3\ngpu3 slots=0\n= 4\n", "hosts")
    told = [str(problem) for problem in error.value.problems]
    assert told == [
        "hosts:3:3: `slot=` is not known of a host; write `slots=`",
        "hosts:4:1: `slots=0` is not a number above 0; write `slots=8`",
        "hosts:5:1: `= 4` names no host; write `gpu1 slots=8`",
    ]
    with pytest.raises(UserError, match="hosts:1:1: no host is named"):
        parse_host_file("# none\n\n", "hosts")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("gpu1 slots=2 slots=4", "`slots=` is written twice"),
        ("gpu1:2 slots=4", "`:2` and `slots=4` both give the number of slots"),
        ("gpu1:0", "`:0` is not a number above 0"),
        ("gpu1 port=99999", "`port=99999` is not a port from 1 to 65535"),
        ("-oProxyCommand=x", "names no host"),
        ("-gpu1", "`-gpu1` begins with a hyphen"),
        ("-l@gpu1", "`-l` begins with a hyphen"),
        ("gpu1;ls", "`gpu1;ls` contains ';', which is not allowed"),
        ("gpu1 address=$(ls)", "contains '$'"),
        ("rank 0=gpu1 slot=0-3", "`rank 0=gpu1 slot=0-3` is a line of Open MPI's rankfile, which places proc"),
        ("me@h1:2222", "`:2222` is a number of slots, as in MPICH, and looks like a port; write `me@h1 port=2222`, or"),
        ("h1:22 address=10.0.0.1", "`:22` is a number of slots, as in MPICH, and looks like a port"),
        ("gpu[1-3] slots=2", "`gpu[1-3]` names several hosts; write a line for each"),
    ],
)
def test_lines_that_are_refused(line: str, told: str) -> None:
    with pytest.raises(UserError) as error:
        parse_host(line, problem)
    assert told in str(error.value)


def test_a_host_of_two_lines_has_the_slots_of_both() -> None:
    assert parse_host_file("a slots=2\nb\na slots=1\n", "hosts")[0].slots == (0, 1, 2)


def test_hosts_and_slots_are_chosen_as_deepspeed_does() -> None:
    hosts = [Host(name, slots=(0, 1, 2, 3)) for name in ("a", "b", "c")]
    assert chosen(hosts, include="a:1,3@c") == {"a": (1, 3), "c": (0, 1, 2, 3)}
    assert chosen(hosts, exclude="a@b:0") == {"b": (1, 2, 3), "c": (0, 1, 2, 3)}
    assert chosen(hosts, include="a@b", exclude="b:2,3") == {"a": (0, 1, 2, 3), "b": (0, 1)}
    for wrong, told in (
        ("d", "no host d"),
        ("a:9", "a has no slot 9"),
        ("a:x", "names no slots"),
        ("", "names no host"),
        (" @", "names no host"),
        ("a:1,1", "names a slot twice"),
        ("a:0@a:1", "a is named twice"),
    ):
        with pytest.raises(UserError, match=told):
            chosen(hosts, include=wrong)
    with pytest.raises(UserError, match="no host is left"):
        chosen(hosts, exclude="a@b@c")
    with pytest.raises(UserError, match="d has no `slots=`, so none can be excluded"):
        chosen([*hosts, Host("d")], exclude="d:3")
