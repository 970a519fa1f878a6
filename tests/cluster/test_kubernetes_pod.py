"""What runs in a pod: the logs of its ranks, and the end of a RayJob's processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kubernetes_runs import run_of

from stoker.cluster.kubernetes import ray_pod_end
from stoker.cluster.kubernetes.cluster_run import ClusterRun
from stoker.cluster.kubernetes.node_script import node_script
from stoker.cluster.kubernetes.pod import RankLogs


def test_the_logs_of_a_run_have_no_name_before_the_rank(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    (tmp_path / "rank-0.log").write_text("of an earlier run\n")
    logs = RankLogs([tmp_path])
    logs.choose(range(2))
    with (tmp_path / "rank-0.log").open("a") as log:
        log.write("new\nunfinished")
    (tmp_path / "rank-2.log").write_text("of another pod\n")
    logs.look()
    logs.look(last=True)
    assert capfdbinary.readouterr().out == b"rank 0 | new\nrank 0 | unfinished\n"


def test_the_logs_of_all_stages_are_printed(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    run = ClusterRun(**{**vars(run_of()), "output": str(tmp_path), "stages": ("sft", "dpo")})
    words = node_script(run).split()
    folders = words[words.index("stoker.cluster.kubernetes.pod") + 1 : words.index("node")]
    assert folders == [f"{tmp_path}/sft/logs", f"{tmp_path}/dpo/logs"]
    logs = RankLogs([Path(folder) for folder in folders])
    logs.choose(range(1))
    for name in ("sft", "dpo"):
        (tmp_path / name / "logs").mkdir(parents=True)
        (tmp_path / name / "logs/rank-0.log").write_text(f"{name}\n")
        logs.choose(range(1))  # the supervisor of each stage names its ranks
    assert capfdbinary.readouterr().out == b"sft rank 0 | sft\ndpo rank 0 | dpo\n"


def test_ray_ends_after_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import os, signal, time\nsignal.signal(15, lambda *_: (time.sleep(0.2), open('saved', 'w'), os._exit(0)))\n"
    )
    (tmp_path / "made_driver.py").write_text(f"{script}open('started', 'w')\ntime.sleep(60)\n")
    (tmp_path / "made_node.py").write_text("import time\ntime.sleep(0.5)\n")
    monkeypatch.setattr(ray_pod_end, "DRIVER", ["-m", "made_driver"])
    monkeypatch.setattr(ray_pod_end, "NODE", ["-m", "made_node"])
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}  # PYTHONSAFEPATH may leave out the folder
    driver, node = (
        subprocess.Popen([sys.executable, "-m", name], env=environment, cwd=tmp_path)
        for name in ("made_driver", "made_node")
    )
    while not (tmp_path / "started").exists():
        assert driver.poll() is None
        time.sleep(0.01)
    ray_pod_end.main()
    assert (tmp_path / "saved").exists() and driver.poll() is not None and node.poll() is not None
