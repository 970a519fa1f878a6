"""Hosts that do not see the run's folder are named before anything is sent, and the marker is removed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from submitting import write_job

from stoker.cluster.chosen_target import choose_target
from stoker.cluster.shell import Given, LocalShell, ShellFailed
from stoker.cluster.ssh import folder_probe
from stoker.cluster.ssh.folder_probe import hosts_without
from stoker.cluster.ssh.ssh_target import SshTarget, open_target
from stoker.cluster.submission import submission_of
from stoker.errors import UserError
from stoker.job import load_job


class HostWithHome(LocalShell):
    """A host on this machine with its own home folder."""

    def __init__(self, name: str, home: Path) -> None:
        self.name = name
        self._home = home
        self.scripts: list[str] = []

    def run(self, script: str, *, given: Given = b"", timeout: float | None = None) -> bytes:
        self.scripts.append(script)
        return super().run(f"HOME='{self._home}'; {script}", given=given, timeout=timeout)


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[HostWithHome]:
    """a and b share their home, and c has another one."""
    monkeypatch.setattr(folder_probe, "SEEN", 1)
    for home in ("one", "other"):
        (tmp_path / home).mkdir()
    return [HostWithHome(name, tmp_path / home) for name, home in (("a", "one"), ("b", "one"), ("c", "other"))]


@pytest.mark.parametrize("existing", ["", "st/run"])
def test_a_host_that_does_not_see_the_folder_is_named(tmp_path: Path, hosts: list[HostWithHome], existing: str) -> None:
    for home in ("one", "other"):
        (tmp_path / home / existing).mkdir(parents=True, exist_ok=True)
    assert hosts_without("\"$HOME\"/'st/run'", hosts) == ["c"]
    assert hosts_without(f"'{tmp_path}/new folder/run'", hosts) == []
    assert not list(tmp_path.rglob(".stoker-*"))


def test_a_folder_that_cannot_be_written(hosts: list[HostWithHome]) -> None:
    with pytest.raises(ShellFailed):
        hosts_without("/proc/none/run", hosts)


def checked(folder: Path, hosts: list[HostWithHome], block: dict[str, Any], **keys: Any) -> None:
    """Checks the folder of a job on these hosts."""
    target_keys = {"ssh": {"hosts": [host.name for host in hosts], "folder": "st", **block}}
    loaded = load_job(write_job(folder, target=target_keys, parallel={"data": len(hosts)}, **keys))
    chosen = choose_target(loaded, None)
    target = open_target(chosen)
    assert isinstance(target, SshTarget)
    by_name = {host.name: host for host in hosts}
    target._connection = lambda host: by_name[host.name]  # type: ignore[method-assign, assignment, return-value]
    target._folder_is_shared(submission_of(loaded, chosen, folder, hosts=len(hosts)))


def test_the_error_names_the_hosts_and_the_key(tmp_path: Path, hosts: list[HostWithHome]) -> None:
    with pytest.raises(UserError, match=r"job.yaml:1:\d+: the run's folder st/\S+ of a is not seen on c") as refused:
        checked(tmp_path, hosts, {}, output="runs/mine")
    assert refused.value.exit_code == 2 and "checkpoint.to" in str(refused.value.problems[0].suggestion)
    checked(tmp_path, hosts, {}, output=str(tmp_path / "all/mine"))


@pytest.mark.parametrize(
    ("count", "block", "keys"),
    [
        (1, {}, {}),
        (3, {"shared": True}, {}),
        (3, {}, {"checkpoint": {"to": "s3://runs/mine"}}),
    ],
)
def test_it_is_not_looked_for_where_nothing_depends_on_it(
    tmp_path: Path, hosts: list[HostWithHome], count: int, block: dict[str, Any], keys: dict[str, Any]
) -> None:
    checked(tmp_path, hosts[:count], block, output="runs/mine", **keys)
    assert not any(host.scripts for host in hosts)
