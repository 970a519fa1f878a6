"""Whether an adapter that was trained here loads where there is no Stoker.

    python benchmarks/fresh_environment.py RUN [--keep FOLDER]

Exports the adapter of a run, makes a virtual environment that holds torch, transformers and peft alone, loads the
adapter there with the two lines that their documentation gives, and compares its logits with the run's own, and those
of the model that peft itself merges and saves. Prints the versions and the largest differences; ends with 1 where they
are above 1e-4 of the logits' spread. Installing takes a minute and needs the package index.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file

from stoker.checkpoint.export.write_export import Export, write_export
from stoker.checkpoint.load_run import TunedRun, open_run
from stoker.models.tuning.adapters import unwrap

PACKAGES = ("torch", "transformers", "peft")
BOUND = 1e-4  # of the spread of the logits
PLAIN = """
import json, sys
from importlib.util import find_spec
from safetensors.torch import load_file
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM

assert find_spec("stoker") is None, "this environment is not fresh"
adapter, asked, merged = sys.argv[1:]
given = load_file(asked)
with torch.no_grad():
    model = AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.float32).eval()
    loaded = model(input_ids=given["ids"]).logits
    model.merge_and_unload().save_pretrained(merged)
    again = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()(input_ids=given["ids"]).logits
spread = given["logits"].std()
found = {"loaded": loaded, "merged": again}
print(json.dumps({name: float((logits - given["logits"]).abs().max() / spread) for name, logits in found.items()}))
"""


def make_environment(folder: Path) -> Path:
    """A virtual environment with the packages in the versions that are here; gives its interpreter."""
    venv.create(folder, with_pip=True, clear=True)
    python = folder / "bin" / "python"
    wanted = [f"{name}=={version(name)}" for name in PACKAGES]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
    return python


def ask(tuned: TunedRun, file: Path) -> None:
    """Writes a few rows of ids and the run's logits for them."""
    words = unwrap(tuned.model).get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, int(words), (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = tuned.model.float()(input_ids=ids).logits
    save_file({"ids": ids, "logits": logits}, file)


def main() -> int:
    """Exports, installs, compares."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", help="a run with an adapter")
    parser.add_argument("--keep", type=Path, help="a folder for the environment, used again where it is there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tuned = open_run(arguments.run, Path.cwd())
        ask(tuned, folder / "asked.safetensors")
        adapter = write_export(tuned, Export("adapter", folder / "adapter"), Path.cwd(), lambda _: None)
        home = arguments.keep or folder / "environment"
        python = home / "bin" / "python"
        if not python.exists():
            python = make_environment(home)
        command = [python, "-I", "-c", PLAIN, str(adapter), str(folder / "asked.safetensors"), str(folder / "merged")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            return 1
        found = {}
        for line in done.stdout.splitlines():
            with suppress(ValueError):
                found = json.loads(line)
        print(f"{', '.join(f'{name} {version(name)}' for name in PACKAGES)}, and no Stoker:")
        print("".join(f"  {name:8} logits differ by {size:.1e} of their spread\n" for name, size in found.items()))
        return int(not found or max(found.values()) > BOUND)


if __name__ == "__main__":
    sys.exit(main())
