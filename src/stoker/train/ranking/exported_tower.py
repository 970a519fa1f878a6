"""The tower of a ranking model in safetensors, as a torch.export graph, and as ONNX."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stoker.errors import Problem, UserError, reason_of, typed_reason
from stoker.models.ranking.build import MODELS
from stoker.models.ranking.item_frequencies import ItemFrequencies
from stoker.models.ranking.model_inputs import RankingInputs, RankingShape
from stoker.sparse.fused_tables import Feature

WEIGHTS, GRAPH, ONNX = "tower.safetensors", "tower.pt2", "tower.onnx"
MOST_ROWS = 1 << 20  # rows of a batch
_EXAMPLE = 3  # rows: torch.export treats sizes 0 and 1 as constants
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


class PositionalTower(nn.Module):
    """A tower that takes its inputs by position: numbers, vectors of each feature, lengths of each sequence."""

    def __init__(self, tower: nn.Module, features: Sequence[str], sequences: Sequence[str]) -> None:
        super().__init__()
        self.tower, self._features, self._sequences = tower, tuple(features), tuple(sequences)

    def forward(self, dense: Tensor, vectors: list[Tensor], lengths: list[Tensor]) -> Tensor:
        by_name = dict(zip(self._features, vectors, strict=True))
        return self.tower(RankingInputs(by_name, dict(zip(self._sequences, lengths, strict=True)), dense))


def tower_arguments(inputs: RankingInputs, features: Sequence[str], sequences: Sequence[str]) -> tuple[Any, ...]:
    """Returns the arguments of a `PositionalTower`."""
    return inputs.dense, [inputs.vectors[name] for name in features], [inputs.lengths[name] for name in sequences]


def weights_of(tower: nn.Module) -> bytes:
    """Returns a tower's parameters and buffers in safetensors, without the frequencies of items, which only its loss
    uses. A collective where they are sharded.
    """
    unused = tuple(f"{name}." for name, module in tower.named_modules() if isinstance(module, ItemFrequencies))
    used = {name: t for name, t in tower.state_dict().items() if not name.startswith(unused)}
    whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in used.items()}
    return save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in whole.items()})


def graph_of(
    tower: nn.Module, shape: RankingShape, features: Mapping[str, Feature], widths: Mapping[str, int]
) -> torch.export.ExportedProgram:
    """Exports the tower as a torch.export graph for any number of rows.

    Args:
        features: all features that are looked up.
        widths: width of each feature's vectors.

    Raises:
        UserError: torch.export cannot trace the module.
    """
    dtype = next((p.dtype for p in tower.parameters()), torch.float32)
    sequences = list(shape.sequences)
    vectors = [
        torch.zeros(_EXAMPLE, *([feature.longest or 1] if feature.pooling == "none" else []), widths[name], dtype=dtype)
        for name, feature in features.items()
    ]
    example = (
        torch.zeros(_EXAMPLE, shape.numbers, dtype=dtype),
        vectors,
        [torch.zeros(_EXAMPLE, dtype=torch.int64) for _ in sequences],
    )
    rows = {0: torch.export.Dim("rows", min=1, max=MOST_ROWS)}
    free = (rows, [rows for _ in vectors], [rows for _ in sequences])
    module = PositionalTower(tower.cpu(), list(features), sequences).eval()
    try:
        with _quiet():
            program = torch.export.export(module, example, dynamic_shapes=free)
    except Exception as error:  # the module's code may raise anything
        advice = "avoid what depends on values, and let every output depend on the rows"
        raise UserError(
            Problem(f"torch.export cannot follow {type(tower).__name__}: {reason_of(error)}", advice)
        ) from error
    program._example_inputs = None  # they would be pickled
    return program


def graph_bytes(program: torch.export.ExportedProgram) -> bytes:
    """Serialises the graph in torch's archive format."""
    file = io.BytesIO()
    with _quiet():
        torch.export.save(program, file)
    return file.getvalue()


def onnx_bytes(program: torch.export.ExportedProgram) -> tuple[bytes | None, str]:
    """Returns the graph as ONNX, or None and the reason."""
    from importlib.util import find_spec

    if missing := [name for name in ONNX_PACKAGES if find_spec(name) is None]:
        return None, f"{missing[0]} is not installed: pip install 'stoker[onnx]'"
    file = io.BytesIO()
    try:
        with _quiet():
            converted = torch.onnx.export(program, (), dynamo=True, verbose=False)
            assert converted is not None
            file.write(converted.model_proto.SerializeToString())
    except Exception as error:
        return None, typed_reason(error)
    return file.getvalue(), ""


def rebuild_tower(model: str, shape: RankingShape, dtype: torch.dtype, weights: bytes) -> nn.Module:
    """Rebuilds a tower of one of Stoker's own architectures."""
    tower = MODELS[model](shape).to(dtype)
    tower.load_state_dict(load(weights))
    return tower.eval()


def loaded_graph(graph: bytes, weights: bytes) -> nn.Module:
    """Loads a tower's graph, with weights that may be newer. Loading a graph can run code of its author."""
    with _quiet():
        module = torch.export.load(io.BytesIO(graph)).module()
    module.load_state_dict({f"tower.{name}": tensor for name, tensor in load(weights).items()})
    return module


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences torch's exporters."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
