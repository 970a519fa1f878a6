"""Replays rows through an exported ranking model in a fresh process.

Run as ``python -m stoker.train.ranking.replay_export``, this file is that process: it reads rows as a service would,
from the folder or the store, and scores them with every exported form of the tower.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from stoker.data.ranking.log_batch import RaggedIds, RowBatch
from stoker.errors import RunFailed
from stoker.online_store.row_reader import RowReader
from stoker.train.ranking.exported_tower import GRAPH, ONNX, WEIGHTS, tower_arguments
from stoker.train.ranking.ranking_scorer import StoredScorer

SECONDS = 900.0  # timeout of the process
ALLOWED = {"fp64": 1e-9, "fp32": 1e-4}  # allowed difference of logits, relative to the largest one or 1


def replay_afresh(place: str, version: int | None, batch: RowBatch) -> dict[str, np.ndarray]:
    """Returns logits [rows, outputs] by the tower's file.

    Raises:
        RunFailed: the process failed.
    """
    with TemporaryDirectory() as folder:
        save_file(_arrays(batch), Path(folder) / "rows")
        asked = json.dumps({"place": place, "version": version, "folder": folder})
        command = [sys.executable, "-P", "-m", "stoker.train.ranking.replay_export"]
        try:
            done = subprocess.run(command, input=asked, text=True, capture_output=True, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise RunFailed(f"the export was not replayed within {SECONDS:g} s") from None
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise RunFailed(f"the export cannot be used: {last}")
        return load_file(Path(folder) / "logits")


def compare(found: Mapping[str, np.ndarray], expected: np.ndarray, precision: str) -> str:
    """Formats the differences between replayed scores and the run's.

    Raises:
        RunFailed: a difference is larger than rounding explains.
    """
    allowed = ALLOWED[precision] * max(1.0, float(np.abs(expected).max(initial=0.0)))
    lines = []
    for name, logits in found.items():
        apart = float(np.abs(logits - expected).max(initial=0.0))
        if not apart <= allowed:
            raise RunFailed(f"{name} scores differently: by {apart:.2g}, and {allowed:.2g} is allowed")
        lines.append(f"{name} {apart:.1g}")
    rows = "1 row" if len(expected) == 1 else f"{len(expected):,} rows"
    return f"replayed {rows} in a fresh process: logits differ by at most {', '.join(lines)}"


def _arrays(batch: RowBatch) -> dict[str, np.ndarray]:
    arrays = {"labels": batch.labels, "weights": batch.weights, "dense": batch.dense}
    for name, ids in batch.ids.items():
        arrays |= {f"ids/{name}": ids.ids, f"lengths/{name}": ids.lengths}
        if ids.weights is not None:
            arrays[f"factors/{name}"] = ids.weights
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def _batch(arrays: dict[str, np.ndarray]) -> RowBatch:
    names = [name.removeprefix("lengths/") for name in arrays if name.startswith("lengths/")]
    ids = {n: RaggedIds(arrays[f"ids/{n}"], arrays[f"lengths/{n}"], arrays.get(f"factors/{n}")) for n in names}
    return RowBatch(arrays["labels"], arrays["weights"], arrays["dense"], ids)


def _answer(asked: Mapping[str, Any]) -> None:
    folder = Path(asked["folder"])
    batch = _batch(load_file(folder / "rows"))
    reader = RowReader(asked["place"], version=asked["version"])
    graph = StoredScorer(reader, trusted=True, graph=True).scorer
    found = {GRAPH: graph.logits(batch)}
    if not reader.manifest["own"]:
        found[WEIGHTS] = StoredScorer(reader).scorer.logits(batch)
    if ONNX in reader.manifest["files"]:
        inputs = graph.inputs(batch)
        dense, vectors, lengths = tower_arguments(inputs, list(inputs.vectors), list(inputs.lengths))
        found[ONNX] = _by_onnx(reader.file(ONNX), [tensor.numpy() for tensor in (dense, *vectors, *lengths)])
    save_file({name: np.ascontiguousarray(logits) for name, logits in found.items()}, folder / "logits")


def _by_onnx(graph: bytes, inputs: list[np.ndarray]) -> np.ndarray:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    return np.asarray(session.run(None, dict(zip(names, inputs, strict=True)))[0], np.float64)


def _main() -> None:
    _answer(json.load(sys.stdin))


if __name__ == "__main__":
    _main()
