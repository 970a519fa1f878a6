"""The matrix: every family and every preference task under every layout against one process, in float64.

Written to docs/matrix.md.

make verify-all                              # all of it, two hours on two cores
python benchmarks/verify_all.py llama gpt2   # some families
"""

from __future__ import annotations

import argparse
import re
import sys
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig

from stoker.cli.output.quiet_libraries import quiet_libraries
from stoker.job.load_job import load_job
from stoker.launch.process_pool import Pool
from stoker.models.families import FAMILIES
from stoker.verify.layout_cases import MATRIX
from stoker.verify.toy_job import make_twin
from stoker.verify.verdict import Verdict
from stoker.verify.verifier import Verifier

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}  # fewer key-value heads than `tensor 4` has processes
COMPLETED: dict[str, dict[str, Any]] = {  # what transformers' defaults lack, or have unlike any model
    "deepseek_v2": {"num_experts_per_tok": 6},
    "ministral": {"head_dim": 128},
    "hunyuan_v1_dense": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 64, "moe_topk": 8},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "llama4_text": {"interleave_moe_layer_step": 2},
    "gemma4_text": {
        **{"num_key_value_heads": 2, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
        **{"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
        "hidden_size_per_layer_input": 0,
    },
    "gemma4_text, small": {
        **{"num_key_value_heads": 2, "num_kv_shared_layers": 18, "use_double_wide_mlp": True},
        "vocab_size_per_layer_input": 262144,
    },
    # By default scores are multiplied by 1, which enlarges rounding beyond the bound.
    "granite": {"attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
    "granitemoe": {"attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
}
SMALL = ("gemma4_text, small",)  # other models of a family
WITHOUT_FACTS = ("falcon",)  # data-parallel layouts only
PROCESSES = 8
JOB = "task: {task}\nmodel: some/model\ndata: none.jsonl\nsteps: 5\n"
LORA = "tune: {method: lora, rank: 4}\n"
# Tasks whose samples are pairs, of one family: their tests have every layout once, in one of these variants.
TASKS = {
    "dpo, LoRA": ("dpo", LORA + "dpo: {sft_weight: 0.1}\n"),
    "dpo, full": ("dpo", "tune: full\ndpo: {loss: robust, label_smoothing: 0.1}\n"),
    "kto, LoRA": ("dpo", LORA + "dpo: {loss: kto}\n"),
    "reward, full": ("reward", "tune: full\nreward: {center: 0.1}\n"),
    "reward, LoRA": ("reward", LORA + "reward: {center: 0.1}\n"),
}
NAMES = [*FAMILIES, *SMALL, *WITHOUT_FACTS, *TASKS]
HEAD = """# The matrix

Every family under every layout, and tasks of preferences with llama: five optimizer steps in float64, against one
process. A cell is the largest difference of losses, gradient norms, all gradients and all weights, relative to what is
larger than 1. A dash is a layout that the family cannot have, for the reason below the table. Written by
`make verify-all`; `stoker verify JOB --layouts all` does the same for the model of a job.
"""


def config_of(name: str) -> PreTrainedConfig:
    """Returns the configuration of a family, with fewer key-value heads than query heads if it allows that."""
    family, completed = name.partition(",")[0], COMPLETED.get(name, {})
    config = AutoConfig.for_model(family, **completed)
    if getattr(config, "is_heterogeneous", False):  # its heads are in `COMPLETED`
        return config
    if getattr(config, "num_key_value_heads", None) is not None and not hasattr(config, "kv_lora_rank"):
        config = AutoConfig.for_model(family, **completed | HEADS)
    return config


def verify_row(name: str, pool: Pool) -> list[Verdict]:
    """Returns the verdicts of a family, or of a task with llama, in the order of the layouts."""
    task, further = TASKS.get(name, ("sft", ""))
    family = "llama" if name in TASKS else name
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "job.yaml").write_text(JOB.format(task=task) + further)
        twin = make_twin(load_job(folder / "job.yaml"), folder, folder, config=config_of(family))
        print(f"\n{twin.describe(MATRIX[0])}", file=sys.stderr)
        verdicts = []
        for verdict in map(Verifier(twin, pool, whole=False).verdict, MATRIX):
            print(f"  {verdict.cell.name:<22} {_cell(verdict)}  {verdict.reason}", file=sys.stderr, flush=True)
            verdicts.append(verdict)
    return verdicts


def _cell(verdict: Verdict) -> str:
    """The largest of all differences; a dash where the layout cannot be."""
    if verdict.comparison is None:
        return "-" if verdict.passed is None else "FAILED"
    sizes = [verdict.comparison.size(kind) for kind in verdict.comparison.largest]
    return f"{max(sizes):.0e}" if verdict.passed else f"**{max(sizes):.0e}**"


def page(found: dict[str, list[Verdict]], before: str) -> str:
    """The matrix as Markdown: rows of the verdicts, and the other rows and notes of the page before."""
    version = f"{date.today()}, {torch.__version__}, {transformers.__version__}"
    rows = dict(re.findall(r"^\| ([\w, ]+) \|(.* \d.*)$", before, re.MULTILINE))
    notes = dict(re.findall(r"^- ([\w, ]+): (.*)$", before, re.MULTILINE))
    for name, verdicts in found.items():
        rows[name] = f" {' | '.join([*map(_cell, verdicts), version])} |"
        notes[name] = "; ".join(dict.fromkeys(v.reason for v in verdicts if v.reason))
    order = [name for name in NAMES if name in rows]
    titles = ["family or task", *(cell.name for cell in MATRIX), "date, torch, transformers"]
    return "\n".join(
        [
            HEAD,
            f"| {' | '.join(titles)} |",
            f"|{' --- |' * len(titles)}",
            *(f"| {name} |{rows[name]}" for name in order),
            "",
            *(f"- {name}: {notes[name]}" for name in order if notes.get(name)),
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--to", type=Path, default=Path("docs/matrix.md"), help="the page; its other rows are kept")
    arguments = parser.parse_args()
    quiet_libraries()
    before = arguments.to.read_text(encoding="utf-8") if arguments.to.exists() else ""
    found: dict[str, list[Verdict]] = {}
    with Pool(PROCESSES) as pool:
        for name in arguments.names:
            found[name] = verify_row(name, pool)
            arguments.to.write_text(page(found, before), encoding="utf-8")  # kept if it is stopped
    return int(any(v.passed is False for verdicts in found.values() for v in verdicts))


if __name__ == "__main__":
    sys.exit(main())
