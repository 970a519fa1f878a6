"""Each process reads its own part: the parts together are the whole, and no process holds more in memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from stoker.job.blocks.model_block import ModelBlock
from stoker.launch.process_pool import Pool
from stoker.models.load_model import blank_model
from stoker.parallel.materialise import materialise
from stoker.parallel.shard_spec import Piece, chunk

CPU = torch.device("cpu")
# Three processes divide none of these, and the last of seven gets no row of the key-value layers.
SHAPE = {
    "vocab_size": 101,
    "hidden_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 46,
    "head_dim": 4,
}


def save(folder: Path, *, tied: bool) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied)).save_pretrained(folder)


def split(model: nn.Module, index: int, size: int) -> dict[str, Piece]:
    """Cuts every matrix but the tied one, some by rows and some by columns."""
    placements = {}
    for name, whole in list(model.named_parameters()):
        if "layers" in name and whole.dim() == 2:
            dim = int("o_proj" in name or "down_proj" in name)
            start, stop = chunk(whole.shape[dim], size, index)
            piece = Piece(dim, start, stop, tuple(whole.shape))
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, nn.Parameter(piece.of(whole.detach()).clone()))
            placements[name] = piece
    return placements


def spread(folder: Path, replicas: int, shards: int, tensor: int) -> tuple[dict[str, Tensor], bool, Tensor | None]:
    """(each parameter as this process' data group holds it together, whether the head is tied, logits if whole)."""
    blank = blank_model(ModelBlock(name=str(folder)), folder, seed=0)
    mesh = init_device_mesh("cpu", (replicas, shards, tensor), mesh_dim_names=("replica", "shard", "tensor"))
    placements = split(blank.model, mesh.get_local_rank("tensor"), tensor) if tensor > 1 else {}
    over = mesh["replica", "shard"] if replicas > 1 else mesh["shard"]
    for block in blank.model.model.layers:
        fully_shard(block, mesh=over)
    fully_shard(blank.model, mesh=over)
    materialise(blank.model, blank.weights, placements, CPU)
    held = {n: p.full_tensor().detach() for n, p in blank.model.named_parameters() if isinstance(p, DTensor)}
    tied = blank.model.lm_head.weight is blank.model.model.embed_tokens.weight
    logits = None if tensor > 1 else blank.model(input_ids=torch.arange(12)[None]).logits.detach()
    return held, tied, logits


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("replicas", "shards", "tensor"), [(1, 3, 1), (1, 7, 1), (2, 2, 1), (1, 2, 3), (2, 2, 2)])
@pytest.mark.often("2-2-2-False", "1-7-1-True")
def test_the_parts_of_all_processes_are_the_whole(
    replicas: int, shards: int, tensor: int, tied: bool, pool: Pool, tmp_path: Path
) -> None:
    save(tmp_path, tied=tied)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    logits = expected(input_ids=torch.arange(12)[None]).logits.detach()
    results = pool.run(spread, tmp_path, replicas, shards, tensor, world=replicas * shards * tensor)
    for rank, (held, still_tied, computed) in enumerate(results):
        assert held.keys() == dict(expected.named_parameters()).keys() and still_tied == tied
        reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        if tensor > 1:
            split(reference, rank % tensor, tensor)
        for name, weight in reference.named_parameters():
            assert torch.equal(held[name], weight), (rank, name)
        if computed is not None:
            torch.testing.assert_close(computed, logits)


MEASURE = """
import sys
from pathlib import Path
import torch
from stoker.job.blocks.model_block import ModelBlock
from stoker.models.load_model import blank_model
from stoker.parallel.materialise import materialise
sys.path.insert(0, sys.argv[1])
from test_materialise import split

def resident(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))

blank = blank_model(ModelBlock(name=sys.argv[2]), Path("/"), seed=0)
placements = split(blank.model, 2, 4)
Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
before = resident("VmRSS:")
materialise(blank.model, blank.weights, placements, torch.device("cpu"))
print(sum(p.numel() * 4 for p in blank.model.parameters()) / 2**20, resident("VmHWM:") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is measured as Linux tells it")
def test_a_process_needs_the_memory_of_its_share(tmp_path: Path) -> None:
    """A quarter of 200 MiB, rows of some matrices and columns of others."""
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=768,
        num_hidden_layers=7,
        num_attention_heads=12,
        intermediate_size=2048,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size > 180 * 2**20
    command = [sys.executable, "-c", MEASURE, str(Path(__file__).parent), str(tmp_path)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    share, growth = map(float, output.split()[-2:])
    assert 45 < share < 60
    largest = 768 * 2048 * 4 / 2**20  # MiB: columns are read from pages of the whole matrix
    assert growth < 1.1 * share + largest + 4
