"""Tokens per second: Stoker's token cache against ``datasets.map`` with two processes.

    python benchmarks/tokenise.py [--rows 120000] [--rounds 3]

Both read the same JSON lines of chat rows (chatterbot-corpus repeated under new numbers), render them with the chat
template of SmolLM2, encode them and mark the trained tokens, into files on the disk; nothing is cached between rounds.
``datasets.map`` is asked twice: row by row, as the fine-tuning tools do it, and in batches of 1,000.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

PROCESSES = 2


def write_rows(path: Path, count: int) -> None:
    """So many chat rows, no two of them equal."""
    from stoker.data.files.rows import Raw
    from stoker.data.offline.offline_corpora import files, rows

    found = [
        raw.value["messages"]
        for raw in rows("chatterbot-corpus", files("chatterbot-corpus"))
        if isinstance(raw, Raw) and isinstance(raw.value, dict)
    ]
    with path.open("w", encoding="utf-8") as file:
        for i in range(count):
            messages = [dict(message) for message in found[i % len(found)]]
            messages[0]["content"] += f" ({i})"
            file.write(json.dumps({"messages": messages}) + "\n")


def with_stoker(path: Path, folder: Path) -> tuple[float, int]:
    """(seconds, tokens) of building a token cache."""
    os.environ["STOKER_CACHE"] = str(folder / "cache")
    from stoker.data.build_cache import open_cache
    from stoker.data.sources import open_source
    from stoker.data.tokenise import RowSettings
    from stoker.job.blocks.source_block import SourceBlock

    source = open_source(SourceBlock(path=str(path)), folder)
    settings = RowSettings("messages", (), "all", "cut", 1024)
    codec = _codec(folder)
    begin = time.perf_counter()
    cache = open_cache(source, codec, settings)
    tokens = int(cache.column("length").sum())
    return time.perf_counter() - begin, tokens


def _codec(folder: Path) -> Any:
    from stoker.job.blocks.model_block import ModelBlock
    from stoker.models.model_source import find_model
    from stoker.models.tokenizers.job_tokenizer import codec_of, load_tokenizer_from, served_stop_ids

    source = find_model("smollm2-135m", folder)
    assert source is not None
    tokenizer = load_tokenizer_from(source)
    return codec_of(tokenizer, served_stop_ids(tokenizer, source, ModelBlock(name="smollm2-135m")))


def with_datasets(path: Path, folder: Path, batched: bool) -> tuple[float, int]:
    """(seconds, tokens) of ``datasets.map`` with the tokenizer's own chat template."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # two processes already fill two cores
    from datasets import disable_progress_bars, load_dataset
    from transformers import AutoTokenizer

    from stoker.models.gguf_model import tokenizer_of_gguf
    from stoker.models.model_source import find_model

    disable_progress_bars()
    source = find_model("smollm2-135m", folder)
    assert source is not None
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of_gguf(Path(source.where)))

    def one(row: dict[str, Any]) -> dict[str, Any]:
        ids = tokenizer.apply_chat_template(row["messages"], return_dict=False)
        prompt = tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True, return_dict=False)
        return {"input_ids": ids, "labels": [-100] * len(prompt) + ids[len(prompt) :]}

    def many(rows: dict[str, Any]) -> dict[str, Any]:
        ids = tokenizer.apply_chat_template(rows["messages"], return_dict=False)
        asked = [messages[:-1] for messages in rows["messages"]]
        prompts = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        labels = [[-100] * len(p) + i[len(p) :] for i, p in zip(ids, prompts, strict=True)]
        return {"input_ids": ids, "labels": labels}

    begin = time.perf_counter()
    data = load_dataset("json", data_files=str(path), split="train", cache_dir=str(folder / "hf"))
    data = data.map(many if batched else one, batched=batched, num_proc=PROCESSES, remove_columns=["messages"])
    seconds = time.perf_counter() - begin
    return seconds, sum(map(len, data["input_ids"]))


def main() -> None:
    """Runs the sides in turn and prints medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=120_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "rows.jsonl"
        write_rows(path, arguments.rows)
        measured: dict[str, list[float]] = {}
        for number in range(arguments.rounds):
            for name in ("stoker", "datasets.map", "datasets.map, batched"):
                folder = Path(temporary) / f"{name.split(',')[-1].strip()}-{number}"
                folder.mkdir()
                if name == "stoker":
                    seconds, tokens = with_stoker(path, folder)
                else:
                    seconds, tokens = with_datasets(path, folder, name.endswith("batched"))
                measured.setdefault(name, []).append(tokens / seconds)
        middle = {name: statistics.median(values) for name, values in measured.items()}
        print(f"{arguments.rows} chat rows, {os.cpu_count()} cores, median of {arguments.rounds}")
        for name, speed in middle.items():
            print(f"{name:<22} {speed:>12,.0f} tokens/s   stoker is {middle['stoker'] / speed:.2f} times as fast")


if __name__ == "__main__":
    main()
