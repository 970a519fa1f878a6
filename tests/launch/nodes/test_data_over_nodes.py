"""Data at a URL, two nodes with caches of their own: the origin gives it once; the run is that from local files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from counting_origin import CountingOrigin
from several_nodes import Nodes, command

from stoker.runs.run_folder import RunFolder

pytestmark = [
    pytest.mark.pool,
    pytest.mark.slow,
    pytest.mark.usefixtures("warm_processes"),
]  # real processes, for seconds

JOB = """
task: sft
model: llama-3m
data: %s
epochs: 2
output: %s
train: {batch: 8, seq_len: 64, precision: fp32}
evaluate: {fraction: 0.0}
parallel: {data: 4}
checkpoint: {every: 1000}
"""
FILES = 3


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[CountingOrigin]:
    """Three files of rows, here and at a web address."""
    with CountingOrigin() as served:
        for number in range(FILES):
            rows = [{"prompt": f"what is {row}?", "completion": f"{row} of {number}"} for row in range(20)]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (tmp_path / f"part-{number}.jsonl").write_text(text)
            served.objects[f"data/part-{number}.jsonl"] = text.encode()
        yield served


def test_two_nodes_read_the_data_once_in_all(
    tmp_path: Path, origin: CountingOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "local.yaml").write_text(JOB % ("part-*.jsonl", "whole"))
    done = command(tmp_path, ["train", "local.yaml"], tmp_path / "whole.log")
    assert done.wait(200) == 0, (tmp_path / "whole.log").read_text()
    nodes = Nodes(tmp_path, 2)
    try:
        (tmp_path / "job.yaml").write_text(JOB % (f"{origin.url}/data/part-{{0..{FILES - 1}}}.jsonl", "run"))
        for number in (1, 2):
            monkeypatch.setenv("STOKER_CACHE", str(tmp_path / f"cache-{number}"))
            nodes.start(number)
        nodes.finish()
    finally:
        nodes.end()
    assert origin.sent == {name: len(data) for name, data in origin.objects.items()}
    whole = RunFolder(tmp_path / "whole")
    assert [line["loss"] for line in nodes.run.read_metrics()] == [line["loss"] for line in whole.read_metrics()]
    events = nodes.run.read_events()
    served = [event for event in events if event["event"] == "cache_served"]
    last = next(event for event in events if event["event"] == "done")
    size = sum(map(len, origin.objects.values()))
    assert sum(event["bytes"] for event in served) == last["cache_peer_bytes"] == size
    assert sum(event["origin_bytes"] for event in served) + last["cache_origin_bytes"] == size
