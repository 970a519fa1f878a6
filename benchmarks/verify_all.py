"""The matrix: every family and every preference task under every layout against one process, in float64.

Written to docs/matrix.md.

make verify-all                                        # all of it, half an hour on two cores
python benchmarks/verify_all.py llama gpt2 --to -      # some families, printed
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from transformers import AutoConfig

from stoker.cli.quiet_libraries import quiet_libraries
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
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 64, "moe_topk": 8},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    # The default multiplies scores by 1, and which enlarges rounding beyond the bound.
    "granitemoe": {"attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
}
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


def verify_column(column: str, pool: Pool) -> list[Verdict]:
    """A family's column of the matrix, or that of a task."""
    task, further = TASKS.get(column, ("sft", ""))
    family = "llama" if column in TASKS else column
    config = AutoConfig.for_model(family, **COMPLETED.get(family, {}))
    if getattr(config, "num_key_value_heads", None) is not None and not hasattr(config, "kv_lora_rank"):
        config = AutoConfig.for_model(family, **HEADS, **COMPLETED.get(family, {}))
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.yaml").write_text(JOB.format(task=task) + further)
        twin = make_twin(load_job(folder / "job.yaml"), folder, folder, config=config)
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


def page(columns: dict[str, list[Verdict]], seconds: float) -> str:
    """The matrix as Markdown."""
    reasons: dict[str, int] = {}
    rows = []
    for number, cell in enumerate(MATRIX):
        found = [cell.name]
        for verdicts in columns.values():
            mark = ""
            if verdicts[number].reason:
                mark = f" [{reasons.setdefault(verdicts[number].reason, len(reasons) + 1)}]"
            found.append(_cell(verdicts[number]) + mark)
        rows.append("| " + " | ".join(found) + " |")
    verdicts = [verdict for column in columns.values() for verdict in column]
    same, differ = (sum(v.passed is passed for v in verdicts) for passed in (True, False))
    head = f"""# The matrix

Every family under every layout, and tasks of preferences with llama, five optimizer steps in float64, against one
process: the largest difference of losses, gradient norms, all gradients and all weights, relative to what is larger
than 1. Written by
`make verify-all` on {date.today()} in {seconds / 60:.0f} minutes, with torch {torch.__version__} and transformers
{transformers.__version__} on {platform.machine()}; {same} cells agree, {differ} differ, {len(verdicts) - same - differ}
cannot be (-, with the reason below). `stoker verify JOB --layouts all` does the same for the model of a job.
"""
    titles = "| layout | " + " | ".join(columns) + " |"
    rule = "| --- |" + " --- |" * len(columns)
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join([head, titles, rule, *rows, "", *notes]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("columns", nargs="*", default=[*FAMILIES, *WITHOUT_FACTS, *TASKS])
    parser.add_argument("--to", default="docs/matrix.md", help="the file; - prints the page")
    arguments = parser.parse_args()
    quiet_libraries()
    begin = time.perf_counter()
    columns: dict[str, list[Verdict]] = {}
    with Pool(PROCESSES) as pool:
        for column in arguments.columns:
            columns[column] = verify_column(column, pool)
            if arguments.to != "-":  # what has been found is kept if it is stopped
                Path(arguments.to).write_text(page(columns, time.perf_counter() - begin), encoding="utf-8")
    if arguments.to == "-":
        print(page(columns, time.perf_counter() - begin))
    return int(any(v.passed is False for column in columns.values() for v in column))


if __name__ == "__main__":
    sys.exit(main())
