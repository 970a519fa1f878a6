"""Spoilt model folders: configuration, tokenizer, weights, index, template, adapter; checked and trained for a step."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from forked import LATE, Case
from mutate import dumped, nested, spoil_bytes, spoil_value, value

MODELS = ("tiny", "tiny", "sharded", "gpt2", "mixtral", "gguf")
ADDED = {
    "config.json": {
        "auto_map": {"AutoConfig": "evil.Config"}, "quantization_config": {"quant_method": "bitsandbytes"},
        "rope_scaling": {"rope_type": "yarn"}, "torch_dtype": "int8", "dtype": "nonsense", "architectures": ["Nothing"],
        "model_type": ["llama"], "hidden_size": "192", "num_attention_heads": 0, "num_hidden_layers": -1,
        "vocab_size": 10**12,
        "num_key_value_heads": 3, "head_dim": 7, "hidden_act": "nothing", "tie_word_embeddings": "yes",
        "pad_token_id": 10**9,
        "max_position_embeddings": -5, "rms_norm_eps": None, "attn_implementation": "nothing",
        "transformers_version": 5,
        "is_encoder_decoder": True, "layer_types": ["x"], "num_hidden_layers ": 3, "num_experts_per_tok": 99,
    },
    "tokenizer_config.json": {
        "tokenizer_class": "NoTokenizer", "chat_template": "{% for", "model_max_length": "x",
        "eos_token": {"content": 5},
        "extra_special_tokens": [1], "added_tokens_decoder": {"x": 1}, "auto_map": {"AutoTokenizer": ["evil.T", None]},
        "bos_token": "nowhere", "pad_token": 7, "additional_special_tokens": "x",
    },
    "generation_config.json": {
        "eos_token_id": "x", "max_length": -1, "temperature": "hot", "eos_token_id ": [], "cache_implementation": "x",
        "stop_strings": 5,
    },
}  # fmt: skip


def model_cases(seed: int, count: int, fixtures: Path) -> Iterator[Case]:
    """Cases that check a job with a spoilt model, train it for a step, and talk to what came out."""
    for number in range(count):
        yield Case(f"model-{seed}-{number}", partial(_run, f"model-{seed}-{number}", fixtures))


def _run(name: str, fixtures: Path) -> int:
    from stoker.cli.main import main

    rng = random.Random(name)
    kind = rng.choice(MODELS)
    folder = Path("model")
    shutil.copytree(fixtures / kind, folder)
    for _ in range(rng.choice([1, 1, 2])):
        _spoil(rng, folder)
    Path("rows.jsonl").symlink_to(fixtures / "rows.jsonl")
    lines = [
        "task: sft",
        "data: rows.jsonl",
        "steps: 1",
        "output: run",
        "train: {batch: 2, seq_len: 64, precision: fp32}",
    ]
    lines += ["evaluate: {fraction: 0.0}", "faults: {restarts: 0, check: false}"]
    model = "model/tiny.gguf" if kind == "gguf" else "model"
    lines += [f"model: {model}", f"tune: {rng.choice(['full', 'lora'])}"]
    Path("job.yaml").write_text("\n".join(lines))
    code = main(["chat", model, "--prompt", "hi", "--max-tokens", "2"])  # opened as it is
    if code not in (0, 2):
        return code
    code = main(["check", "job.yaml"])
    if code != 0:
        return code
    code = main(["train", "job.yaml"])
    if code == 0:
        code = main(["chat", "run", "--prompt", "hi", "--max-tokens", "2"])
    return LATE if code == 2 else code


def _spoil(rng: random.Random, folder: Path) -> None:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    weights = [path for path in files if path.suffix == ".safetensors"]
    if not files:  # the only one is gone already
        return
    file = rng.choice([path for path in files if path not in weights] + weights[:2])
    action = rng.random()
    if action < 0.06:
        file.unlink()
    elif action < 0.1:
        file.unlink()
        file.mkdir()
    elif action < 0.14:
        _add(folder / "adapter_config.json", dumped(spoil_value(rng, {"peft_type": "LORA", "r": 8})))
    elif action < 0.2:
        _add(folder / "chat_template.jinja", rng.choice(["{% for", "", "{{ x.y }}", "\0", "{{ 1/0 }}"]))
    elif file.suffix == ".safetensors" and action < 0.8:
        _spoil_weights(rng, file)
    elif file.suffix == ".json" and action < 0.85:
        _spoil_json(rng, file)
    else:
        file.write_bytes(spoil_bytes(rng, file.read_bytes()))


def _add(file: Path, text: str) -> None:
    if not file.is_dir():  # an earlier change has put a folder there
        file.write_text(text)


def _spoil_json(rng: random.Random, file: Path) -> None:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:  # spoilt already
        return
    if not isinstance(data, dict) or not data:
        return
    if isinstance(data.get("weight_map"), dict) and data["weight_map"] and rng.random() < 0.7:
        names = ["../outside.safetensors", "/etc/passwd", "missing.safetensors", 5, None, "", ".", "config.json", ["x"]]
        data["weight_map"][rng.choice(sorted(data["weight_map"]))] = rng.choice(names)
    elif file.name in ADDED and rng.random() < 0.6:
        key = rng.choice(sorted(ADDED[file.name]))
        data[key.strip()] = ADDED[file.name][key]
    elif rng.random() < 0.1:
        data = {**data, "deep": nested(100)}
    else:
        data = spoil_value(rng, data) if rng.random() < 0.7 else {**data, rng.choice(sorted(data)): value(rng)}
    file.write_bytes(dumped(data).encode())


def _spoil_weights(rng: random.Random, file: Path) -> None:
    data = file.read_bytes()
    try:
        (size,) = struct.unpack("<Q", data[:8])
        header: dict[str, Any] = json.loads(data[8 : 8 + size])
        name = rng.choice(sorted(set(header) - {"__metadata__"}))
        start, end = header[name]["data_offsets"]
    except (ValueError, struct.error, IndexError):  # spoilt already
        return
    body = bytearray(data[8 + size :])
    action = rng.randrange(9)
    if action == 0:
        body[start : start + 4] = struct.pack("<f", rng.choice([float("nan"), float("inf")]))
    elif action == 1:
        header[name]["dtype"] = rng.choice(["I32", "F16", "I8", "X9", 5, "F8_E4M3", "BOOL", "U32"])
    elif action == 2:
        header[name]["shape"] = rng.choice([[], [0], [-1], [10**12], [1, 2, 3], "x", header[name]["shape"][::-1]])
    elif action == 3:
        header[name]["data_offsets"] = rng.choice([[0, 0], [-1, 5], [5, 1], [0, 10**15], "x", [0]])
    elif action == 4:
        header.pop(name)
    elif action == 5:
        header[rng.choice(["", "x", "\x1b[31m", "model.layers.99.mlp.up_proj.weight"])] = header.pop(name)
    elif action == 6:
        header["__metadata__"] = rng.choice([{"format": "tf"}, {}, "x", {"format": 5}, None])
    elif action == 7:
        body = body[: rng.randrange(len(body))]
    else:
        _retyped(header, body, name, start, end)
    text = dumped(header).encode()
    length = rng.choice([len(text)] * 8 + [0, 10**9, 2**63])
    file.write_bytes(struct.pack("<Q", length) + text + bytes(body))


def _retyped(header: dict[str, Any], body: bytearray, name: str, start: int, end: int) -> None:
    """Puts a tensor of whole numbers in the place of one of fractions, as quantisers store them."""
    size = (end - start) // 4
    del body[start + size : end]
    header[name]["dtype"] = "I8"
    for key, entry in header.items():
        if key != "__metadata__":
            entry["data_offsets"] = [at - (3 * size if at >= end else 0) for at in entry["data_offsets"]]
