"""The soak: one run through random faults of all kinds, without a human hand; its end against an undisturbed run's.

python benchmarks/soak.py                              # 30 faults, two processes, about four minutes on two cores
python benchmarks/soak.py --faults 10 --layout parallel.tensor=2
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from stoker.hardware.processor import processor_name

WORDS = 200
ROWS = 400
JOB = """task: pretrain
model: {model}
data: rows.jsonl
steps: {steps}
seed: 3
output: run
train: {{batch: 4, lr: 0.003, seq_len: 64, precision: fp32}}
evaluate: {{fraction: 0.05, every: 20}}
checkpoint: {{every: 5, keep: 3}}
faults: {{not_finite: roll-back, back_off: 0.1, hang: {hang}}}
"""
STEPS_A_FAULT = 14  # of the run: one slow process in six faults has 40 steps for itself


def write_job(folder: Path, *, steps: int, hang: float) -> None:
    """A model of two layers with random weights, a tokenizer of some words, rows of them, and a job."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS + 2,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    vocabulary = {"<unk>": 0, "</s>": 1, **{f"w{i}": i + 2 for i in range(WORDS)}}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(folder / "model")
    with (folder / "rows.jsonl").open("w") as file:
        for row in range(ROWS):
            text = " ".join(f"w{(row * 31 + word * (1 + row % 7)) % WORDS}" for word in range(20 + row % 40))
            file.write(json.dumps({"text": text}) + "\n")
    (folder / "job.yaml").write_text(JOB.format(model=folder / "model", steps=steps, hang=hang))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layout", nargs="*", default=["parallel.data=2"], metavar="key=value")
    parser.add_argument("--hang", type=float, default=5.0, help="seconds of silence from which a process is hung")
    parser.add_argument("--json", action="store_true", help="print what `stoker chaos --json` prints")
    asked = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_job(folder, steps=STEPS_A_FAULT * asked.faults, hang=asked.hang)
        options = ["--random", str(asked.faults), "--seed", str(asked.seed), "--json"]
        begin = time.monotonic()
        ended = subprocess.run(
            [sys.executable, "-m", "stoker", "chaos", "job.yaml", *asked.layout, *options],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - begin
    if not ended.stdout:
        return ended.returncode
    if asked.json:
        print(ended.stdout)
    else:
        _print(json.loads(ended.stdout), seconds, " ".join(asked.layout))
    return ended.returncode


def _print(answer: dict, seconds: float, layout: str) -> None:
    print(f"{date.today()}, {processor_name()}, {os.cpu_count()} cores, {layout}")
    print(f"{seconds:.0f} s for the undisturbed run and the one with {len(answer['faults'])} faults\n")
    print(
        "| kind | happened | noticed | slowest notice, s | steps lost, at most | training again, s (median, slowest) |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for kind in Counter(account["fault"]["kind"] for account in answer["faults"]):
        mine = [account for account in answer["faults"] if account["fault"]["kind"] == kind]
        notices = [account["after"] for account in mine if account["after"] is not None]
        again = sorted(account["recovery"] for account in mine if account["recovery"] is not None)
        happened, noticed = sum(account["happened"] for account in mine), len(notices)
        slowest = f"{max(notices):.1f}" if notices else "-"
        recovery = f"{again[len(again) // 2]:.1f}, {again[-1]:.1f}" if again else "-"
        lost = max(account["lost"] for account in mine)
        print(f"| {kind} | {happened} | {noticed} | {slowest} | {lost} | {recovery} |")
    same = answer["equality"]
    print(f"\nended at step {same['reached']} of {same['steps']}; losses {same['loss']:.1e} apart, weights")
    print(f"{same['weight']:.1e} apart; samples {'each exactly once' if same['samples'] else 'DIFFER'}")
    if answer["goodput"]:
        print(f"goodput {answer['goodput']['effective']:.1%} of {answer['goodput']['wall']:.0f} s")
    print("survived" if answer["survived"] else f"NOT survived: {answer['message']}")


if __name__ == "__main__":
    sys.exit(main())
