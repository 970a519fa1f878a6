"""What a process that trains imports, and what it leaves to those that need it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TRAINS = """
import sys
import stoker.launch.worker, stoker.train.language.prepare_language
left = {"bitsandbytes", "boto3", "scipy.optimize", "torchao"}
assert not left & sys.modules.keys(), left & sys.modules.keys()
"""
INSTALLED = """
from accelerate.utils import is_boto3_available
from peft.import_utils import is_bnb_4bit_available
from transformers.utils import is_bitsandbytes_available, is_scipy_available, is_torchao_available
assert is_boto3_available() and is_bnb_4bit_available() and is_bitsandbytes_available()
assert is_scipy_available() and is_torchao_available()
from peft.tuners.lora.bnb import Linear4bit
"""
USED = """
import peft.helpers, torch
from accelerate.commands.config import sagemaker
from transformers.loss import loss_for_object_detection
from transformers.quantizers import quantizer_torchao
rows, columns = loss_for_object_detection.linear_sum_assignment(torch.tensor([[4.0, 1], [2, 8]]).numpy())
assert (rows.tolist(), columns.tolist()) == ([0, 1], [1, 0])
assert "w" in quantizer_torchao.flatten_tensor_state_dict({"w": torch.ones(2)})[1]
assert sagemaker.boto3.Session(region_name="here").region_name == "here"
four, state = peft.helpers.bnb.functional.quantize_4bit(torch.ones(64), blocksize=64)
assert set(peft.helpers.bnb.functional.dequantize_4bit(four, state).flatten().tolist()) == {1.0}
assert left <= sys.modules.keys()
import inspect, scipy.optimize, scipy.stats
assert isinstance(scipy.optimize.OptimizeResult, type)
assert "class HungarianMatcher" in inspect.getsource(loss_for_object_detection)
"""


@pytest.mark.slow  # imports all of these libraries
def test_what_trains_leaves_to_others_what_few_need() -> None:
    # With another option first it is no copy of a warm process.
    words = [sys.executable, "-u", "-c", TRAINS + INSTALLED + USED]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("loaded", [True, False])
def test_a_module_alone_gets_the_placeholder_unless_the_library_is_there(loaded: bool, tmp_path: Path) -> None:
    """Another module that is imported meanwhile gets the library; one that is absent is absent."""
    for name, text in {
        "library": "def double(n): return 2 * n",
        "other": "import library",
        "importing": "import library, other\ndef quadruple(n):\n    import library\n    return library.double(2 * n)",
        "without": "import no_such_library",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from stoker.deferred_imports import LEFT, Later
LEFT |= {{"importing": "library", "without": "no_such_library"}}
if {loaded}:
    import library
import importing, other
assert isinstance(importing.library, Later) != {loaded} and importing.library.double(2) == 4
assert not isinstance(other.library, Later) and importing.quadruple(1) == 4
try:
    import without
except ModuleNotFoundError:
    print("absent")
"""
    done = subprocess.run([sys.executable, "-u", "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("absent\n", 0), done.stderr


@pytest.mark.parametrize(
    "name", ["data.ranking.find_features", "data.ranking.ranking_block", "job.task_spec", "train.tasks.ranking"]
)
def test_a_module_that_a_task_imports_may_be_the_first(name: str) -> None:
    subprocess.run([sys.executable, "-c", f"import stoker.{name}"], check=True)


def test_the_page_starts_without_torch() -> None:
    code = "import sys, stoker.page.start_page; sys.exit(len({'torch', 'transformers', 'peft'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", code], check=True)
