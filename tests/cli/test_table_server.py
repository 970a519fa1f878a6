"""The verb `stoker table-server`: a process that serves, and one message for each mistake."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stoker.cli.main import main
from stoker.sparse import Feature, JaggedIds, SparseEmbeddings, TableSettings
from stoker.sparse.servers import RowServers

pytestmark = pytest.mark.usefixtures("warm_processes")


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(bytes(range(32)))
    path.chmod(0o600)
    return path


@pytest.mark.slow  # a process of its own that imports torch
def test_a_model_trains_on_rows_of_another_process(secret: Path, tmp_path: Path) -> None:
    words = ["--listen", "127.0.0.1:0", "--secret", str(secret), "--folder", str(tmp_path / "rows")]
    command = [sys.executable, "-m", "stoker", "table-server", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        host, port = process.stdout.readline().split()[-1].split(":")
        servers = RowServers(((host, int(port)),), secret.read_bytes(), patience=10)
        model = SparseEmbeddings(
            [TableSettings("t", 2, optimizer="sgd", lr=1.0, init_scale=0.0)], {"f": Feature("t")}, servers=servers
        )
        model({"f": JaggedIds.single(torch.tensor([3, 3, 4]))})["f"].sum().backward()
        model.apply_gradients()
        assert model.state().tables["t"].values.tolist() == [[-2.0, -2.0], [-1.0, -1.0]]
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(10) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--listen": "localhost"}, "write it as 10.0.0.1:29500"),
        ({"--snapshot-every": "0"}, "write 1 or more"),
        ({"--secret": "absent"}, "--secret absent cannot be read"),
        ({"--folder": "/dev/null/rows"}, "rows cannot be kept in /dev/null/rows"),
        ({"--listen": "192.0.2.1:29500"}, "cannot listen there"),
    ],
)
def test_mistakes_are_named(
    change: dict[str, str], message: str, secret: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {"--listen": "127.0.0.1:0", "--secret": str(secret), "--folder": str(tmp_path / "rows")} | change
    code = main(["table-server", *(part for pair in words.items() for part in pair)])
    assert message in capsys.readouterr().err
    assert code == (3 if "cannot listen there" in message else 2)
