"""What is sent: nodes and processes, files at one fingerprint, paths as they are on the nodes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from submitting import submission_in, write_job

from stoker.cluster.chosen_target import choose_target
from stoker.cluster.ray.ray_target import RayTarget
from stoker.cluster.record import NAME, name_of
from stoker.cluster.sent_files import ARCHIVE
from stoker.cluster.submission import port_of
from stoker.errors import UserError
from stoker.job.document.yaml_document import parse_document
from stoker.job.load_job import check_document, load_job
from stoker.models.context_length import context_problem


@pytest.mark.parametrize(
    ("target", "hosts", "processes", "expected"),
    [
        ({}, 3, 6, (3, 2)),
        ({}, 4, 6, (3, 2)),  # the most hosts that have equally many
        ({}, None, 6, (1, 6)),
        ({"nodes": 2}, 3, 6, (2, 3)),
        ({"devices": 2}, 4, 6, (3, 2)),
        ({"nodes": 3, "devices": 2}, 3, 6, (3, 2)),
        ({}, 3, 1, (1, 1)),
    ],
)
def test_nodes_and_processes(
    tmp_path: Path, target: dict[str, Any], hosts: int | None, processes: int, expected: tuple[int, int]
) -> None:
    found = submission_in(
        tmp_path, hosts=hosts, parallel={"data": processes}, target={"ssh": {"hosts": ["a"], **target}}
    )
    assert (found.nodes, found.devices) == expected
    assert ["--nodes", str(found.nodes), "--devices", str(found.devices)] == found.node_words(["a:1", "b:1"])[-4:]


def test_several_nodes_do_not_write_to_one_hosts_store(tmp_path: Path) -> None:
    def submitted(processes: int, to: str) -> int:
        job = {
            "task": "ranking", "model": None, "ranking": {"label": "a"}, "export": {"sync": {"to": to}},
            "parallel": {"data": processes}, "target": {"ssh": {"hosts": ["a"]}},
        }  # fmt: skip
        return submission_in(tmp_path, hosts=2, **job).nodes

    assert (submitted(1, "lmdb:///rows"), submitted(2, "redis://a:6379/0")) == (1, 2)
    with pytest.raises(UserError, match=r"job.yaml:1:\d+: LMDB is a folder of one host, .* on 2; write redis://"):
        submitted(2, "lmdb:///rows")


@pytest.mark.parametrize(
    ("nodes", "option", "told"),
    [
        ({"min": 2, "max": 3}, "2:3", ""),
        ({"min": 3, "max": 3}, "3", ""),
        ({"min": 1, "max": 2}, "", "`faults.nodes.max` is 2, and the run has 3 nodes on this target; write `max: 3`"),
        ({"min": 4, "max": 4}, "", "`faults.nodes.max` is 4, and the run has 3 nodes"),
    ],
)
def test_the_least_number_of_nodes_is_that_of_the_job(
    tmp_path: Path, nodes: dict[str, int], option: str, told: str
) -> None:
    keys = {"parallel": {"data": 3}, "faults": {"nodes": nodes}, "target": {"ssh": {"hosts": ["a"]}}}
    if told:
        with pytest.raises(UserError, match=rf"job.yaml:1:\d+: {told}") as error:
            submission_in(tmp_path, hosts=3, **keys)
        assert error.value.exit_code == 2
        return
    found = submission_in(tmp_path, hosts=3, **keys)
    words = found.node_words(["a:1"])
    assert words[words.index("--nodes") + 1] == found.nodes_option == option
    chosen = choose_target(load_job(write_job(tmp_path, **{**keys, "target": {"ray": {"nodes": 3}}})), None)
    plan = json.loads(RayTarget(chosen, chosen.block)._plan(found, gpus=0))  # type: ignore[arg-type]
    assert plan["words"][plan["words"].index("--nodes") + 1] == option


def test_islands_are_written_for_the_nodes(tmp_path: Path) -> None:
    parallel = {"data": 6, "sync": {"every": 2}}
    found = submission_in(tmp_path, hosts=3, parallel=parallel, target={"ssh": {"hosts": ["a"]}})
    sent = check_document(parse_document(found.job, file="job.yaml"))
    assert found.nodes == 3 and sent.job.parallel.sync.islands == 3 and sent.origins["parallel.sync.islands"].where


@pytest.mark.parametrize(
    ("target", "hosts", "told", "code"),
    [
        ({"nodes": 4}, 4, "6 processes, which cannot be spread equally over 4 nodes; write `nodes: 3`", 2),
        ({"nodes": 2, "devices": 2}, 2, "2 nodes with 2 processes are 4, and the layout", 2),
        ({"devices": 2}, 2, "3 nodes are needed, and the target has 2 hosts", 3),
        ({"devices": 4}, 2, "cannot be spread equally", 2),
    ],
)
def test_layouts_that_do_not_fit(tmp_path: Path, target: dict[str, Any], hosts: int, told: str, code: int) -> None:
    with pytest.raises(UserError) as error:
        submission_in(tmp_path, hosts=hosts, parallel={"data": 6}, target={"ssh": {"hosts": ["a"], **target}})
    assert told in str(error.value) and error.value.exit_code == code
    assert error.value.problems[0].line


def test_a_planned_layout_needs_to_know_the_nodes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"job.yaml:1:\d+: `parallel: auto` needs to know the nodes; write `cluster"):
        submission_in(tmp_path, parallel="auto", target={"ssh": {"hosts": ["a"]}})


def test_the_fingerprint_is_of_contents(tmp_path: Path) -> None:
    target = {"ssh": {"hosts": ["a"]}}
    first = submission_in(tmp_path, target=target)
    again = submission_in(tmp_path, target={"ssh": {"hosts": ["other"]}})
    assert first.fingerprint == again.fingerprint == replace(first, files=first.files[::-1]).fingerprint
    assert {file.path for file in first.files} == {"job.yaml", "rows.jsonl", ARCHIVE}
    (tmp_path / "more.py").write_text("x = 1")
    more = submission_in(tmp_path, target={"ssh": {"hosts": ["a"], "send": ["*.py"]}})
    assert "more.py" in {file.path for file in more.files} and more.fingerprint != first.fingerprint
    (tmp_path / "more.py").write_text("x = 2")
    assert submission_in(tmp_path, target={"ssh": {"hosts": ["a"], "send": ["*.py"]}}).fingerprint != more.fingerprint


def test_what_lies_elsewhere_is_sent_under_another_path(tmp_path: Path) -> None:
    elsewhere, here = tmp_path / "elsewhere", tmp_path / "here"
    elsewhere.mkdir(), here.mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (elsewhere / name).write_text('{"instruction": "a", "output": "b"}\n')
    data = [str(elsewhere / "a.jsonl"), f"{elsewhere}/b*.jsonl", "rows.jsonl"]
    found = submission_in(here, data=data, target={"ssh": {"hosts": ["a"]}})
    sent = {file.path: file for file in found.files}
    job = check_document(parse_document(found.job, "job.yaml")).job
    first, second, third = (source.path for source in job.data)
    assert first in sent and first.startswith("outside/") and third == "rows.jsonl"
    assert [path for path in sent if path.endswith("/b.jsonl")] == [f"{second.rpartition('/')[0]}/b.jsonl"]
    assert job.target == "local"


def test_on_a_login_node_data_stays_where_it_is(tmp_path: Path) -> None:
    found = submission_in(tmp_path, target={"slurm": {"nodes": 1}})
    assert {file.path: file.in_place for file in found.files} == {"job.yaml": False, ARCHIVE: False, "rows.jsonl": True}


@pytest.mark.parametrize(("train", "expected"), [({}, None), ({"seq_len": 256}, 256)])
def test_a_sequence_length_that_was_not_written_is_the_nodes_to_lower(
    tmp_path: Path, train: dict[str, Any], expected: int | None
) -> None:
    """Gpt2 has 1,024 positions and the default is 1,024 tokens, so virtual tokens lower it."""
    keys = {"model": "gpt2", "tune": {"method": "prompt", "tokens": 20}, "train": {"batch": 4, **train}}
    found = submission_in(tmp_path, hosts=1, target={"ssh": {"hosts": ["a"]}}, **keys)
    loaded = check_document(parse_document(found.job, "job.yaml"))
    assert loaded.job.train.seq_len == (expected or 1024)
    assert context_problem(loaded, 1024) is None
    assert (context_problem(loaded, 100) is None) == (expected is None)


def test_names_fit_hosts_and_labels() -> None:
    assert name_of("runs/My Job_2") == "my-job-2" and name_of("s3://b/x/") == "x" and name_of("_") == "job"
    names = [name_of(f"runs/{name}") for name in ("模型", "数据", "naïve")]
    assert all(map(NAME.fullmatch, names)) and len(set(names)) == 3 and names[2] == "na-ve-f86fd8"
    assert port_of("a") == port_of("a") and 1024 < port_of("b") < 32768
