"""A job's twin: small, of the same family and features, and run by the code that trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from stoker.data.corpus import open_corpus
from stoker.job.load import load_job
from stoker.job.schema import Job
from stoker.models.text import open_text_side
from stoker.train.cells import MATRIX, Cell, planned, reference_of
from stoker.train.shrink import GROUPED, HEADS, WINDOW, Shape, shrunk
from stoker.train.trace import compare, trace
from stoker.train.twin import SEQ_LEN, Twin, make_twin

FAMILIES = (  # noqa: SIM905
    "gpt2 bloom opt gpt_neo gptj gpt_neox falcon llama qwen2 qwen3 mistral gemma2 gemma3_text glm glm4 phi phi3 "
    "cohere granite mixtral qwen2_moe qwen3_moe gpt_oss"
).split()


def job_of(folder: Path, text: str = "") -> Job:
    path = folder / "original.yaml"
    path.write_text(f"model: some/model\ndata: none.jsonl\nsteps: 100\n{text or 'task: sft'}\n")
    return load_job(path).job


def twin_of(folder: Path, text: str = "", family: str = "llama", **more: Any) -> Twin:
    (folder / "twin").mkdir()
    config = AutoConfig.for_model(family, **more)
    return make_twin(job_of(folder, text), folder, folder / "twin", steps=5, config=config)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shrunk_model_keeps_its_features(family: str) -> None:
    original = AutoConfig.for_model(family)
    small = shrunk(original, Shape(blocks=5))
    assert small.model_type == family and small.num_hidden_layers == 5
    assert small.tie_word_embeddings == original.tie_word_embeddings
    kinds = getattr(original, "layer_types", None)
    assert kinds is None or set(small.layer_types) == set(kinds)
    heads = getattr(original, "num_key_value_heads", None)
    if heads is not None:
        assert small.num_key_value_heads == (HEADS if heads == original.num_attention_heads else GROUPED)
    if getattr(original, "sliding_window", None) and getattr(original, "use_sliding_window", True):
        assert small.sliding_window == WINDOW
    assert not any(v for k, v in vars(small).items() if "drop" in k and isinstance(v, float))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small)
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    assert model.get_input_embeddings().weight.shape[0] % 2 == 1


@pytest.mark.parametrize("task", ["sft", "pretrain"])
def test_documents_are_as_uneven_as_they_come(task: str, tmp_path: Path) -> None:
    twin = twin_of(tmp_path, f"task: {task}")
    loaded = load_job(twin.job_file(Cell("", {})))
    text = open_text_side(loaded, tmp_path)
    corpus = open_corpus(loaded.job, text.codec, seq_len=text.seq_len, base=tmp_path, loaded=loaded)
    documents = [d.row for i in range(corpus.sequences.total(1)) for d in corpus.sequences[i]]
    lengths = [len(row.ids) for row in documents]
    trained = [int(row.trained[1:].sum()) for row in documents]
    assert min(lengths) <= 3 and max(lengths) == SEQ_LEN > 4 * WINDOW
    assert min(trained) == 1 and max(trained) > 8
    assert (sum(trained) == sum(lengths) - len(lengths)) == (task == "pretrain")


def test_a_twin_trains_as_its_job_does(tmp_path: Path) -> None:
    twin = twin_of(
        tmp_path,
        "task: pretrain\nseed: 3\ntune: {method: qlora, rank: 64, dropout: 0.1, targets: [q_proj]}\n"
        "train: {optimizer: sgd, schedule: wsd, weight_decay: 0.3, clip: 0, pack: true, batch: 64}",
    )
    job = load_job(twin.job_file(Cell("", {}, accumulation=3))).job
    assert (job.task, job.seed, job.steps) == ("pretrain", 3, 5)
    assert (job.train.optimizer, job.train.schedule, job.train.weight_decay) == ("sgd", "wsd", 0.3)
    assert (job.train.clip, job.train.pack, job.train.accumulation, job.train.batch) == (0.0, True, 3, 6)
    assert (job.tune.method, job.tune.targets, job.tune.dropout) == ("lora", ["q_proj"], 0.0)
    assert len(twin.facts) == 2 and "quantised" in twin.facts[0] and "dropout" in twin.facts[1]


def test_the_jobs_own_layout_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "task: sft\nmodel: some/model\ndata: none.jsonl\ntrain: {batch: 64, accumulation: 16}\n"
        "parallel: {data: 2, pipeline: 3, stages: [9, 12, 9], devices: [0, 1, 2, 3, 4, 5]}\n"
    )
    cell = planned(load_job(path))
    assert cell.parallel == {"data": 2, "pipeline": 3, "stages": [1, 2, 1]}
    assert (cell.world, cell.blocks) == (6, 4)
    assert cell.batch == {"batch": 24, "micro_batch": 2, "accumulation": 6}


def test_every_layout_of_the_matrix_is_well_formed(tmp_path: Path) -> None:
    twin = twin_of(tmp_path)
    for cell in MATRIX:
        load_job(twin.job_file(cell))
    assert max(cell.world for cell in MATRIX) == 8


def test_accumulation_changes_nothing_and_another_seed_does(tmp_path: Path) -> None:
    twin = twin_of(tmp_path)
    cell = Cell("", {}, accumulation=4)
    reference = trace(str(twin.job_file(reference_of(cell))))
    assert reference is not None and len(reference.losses) == 5
    assert all(norm > 0.1 for norm in reference.grad_norms)  # they are clipped
    other = trace(str(twin.job_file(cell)))
    assert other is not None and other.losses is not reference.losses
    assert compare(other, reference).first_beyond(1e-12) is None

    wrong = trace(str(twin.job_file(Cell("", {}, accumulation=4, train={"beta2": 0.998}))))
    assert wrong is not None
    found = compare(wrong, reference)
    assert found.loss.where != "step 1" and found.loss.size > 1e-8  # only the second step knows of the first
    assert "differs by" in (found.first_beyond(1e-10) or "")
