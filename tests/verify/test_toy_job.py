"""A job's twin: small, of the same family and features, and run by the code that trains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from stoker.data.corpus import open_corpus
from stoker.job.load_job import LoadedJob, load_job
from stoker.job.schema import Job
from stoker.job.task_spec import TASKS, RowSpec
from stoker.models.text import open_text_side
from stoker.parallel.tensor_parallel.head_split import share_heads
from stoker.verify import plain_loop, plain_router_loss, plain_rows
from stoker.verify.difference import compare
from stoker.verify.layout_cases import MATRIX, Cell, job_case, reference_of
from stoker.verify.plain_rows import batches_of, read
from stoker.verify.plain_run import as_plain, in_other_form, plain_job, run_plain, why_not
from stoker.verify.toy_config import GROUPED, HEADS, WINDOW, ToyShape, shrunk
from stoker.verify.toy_job import SEQ_LEN, LayoutVariant, Twin, make_twin
from stoker.verify.toy_keys import dropout_rates
from stoker.verify.toy_rows import CHARACTERS, END_ID
from stoker.verify.verify_run import run_and_trace

FAMILIES = (  # noqa: SIM905
    "gpt2 bloom opt gpt_neo gptj gpt_neox falcon llama qwen2 qwen3 mistral gemma2 gemma3_text glm glm4 phi phi3 "
    "cohere granite mixtral qwen2_moe qwen3_moe gpt_oss glm4_moe deepseek_v3 "
    "glm4_moe_lite granitemoe ernie4_5_moe minimax_m2 qwen3_next cwm cohere2 olmo3 llama4_text gemma4_text glm_moe_dsa "
    "exaone_moe solar_open afmoe mimo_v2_flash"
).split()


GEMMA4 = {"enable_moe_block": True, "num_experts": 16, "top_k_experts": 4, "moe_intermediate_size": 64}


def loaded_job(folder: Path, text: str = "") -> LoadedJob:
    path = folder / "original.yaml"
    path.write_text(f"model: some/model\ndata: none.jsonl\n{text or 'task: sft'}\n")
    return load_job(path)


def twin_of(folder: Path, text: str = "", family: str = "llama", steps: int | None = None, **more: Any) -> Twin:
    (folder / "twin").mkdir()
    config = AutoConfig.for_model(family, **more)
    return make_twin(loaded_job(folder, text), folder, folder / "twin", steps=steps, config=config)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shrunk_model_keeps_its_features(family: str) -> None:
    original = AutoConfig.for_model(family)
    small = shrunk(original, ToyShape(blocks=5))
    assert small.model_type == family and small.num_hidden_layers == 5
    assert small.tie_word_embeddings == original.tie_word_embeddings
    kinds = getattr(original, "layer_types", None)
    assert kinds is None or set(small.layer_types) == set(kinds)
    heads = getattr(original, "num_key_value_heads", None)
    if heads is not None:
        grouped = GROUPED <= small.num_key_value_heads < small.num_attention_heads
        assert grouped == (heads < original.num_attention_heads)
    assert small.num_attention_heads == HEADS
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
    loaded = load_job(twin.job_file(Cell("", {}, accumulation=16)))
    text = open_text_side(loaded, tmp_path)
    corpus = open_corpus(loaded.job, text.codec, seq_len=text.seq_len, base=tmp_path, loaded=loaded)
    documents = [d.row for i in range(corpus.sequences.total(1)) for d in corpus.sequences[i]]
    lengths = [len(row.ids) for row in documents]
    trained = [int(row.trained[1:].sum()) for row in documents]
    assert min(lengths) <= 4 and max(lengths) == SEQ_LEN > 4 * WINDOW
    assert min(trained) == 1 and max(trained) > 8
    assert (sum(trained) == sum(lengths) - len(lengths)) == (task == "pretrain")


@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_pairs_make_the_samples_of_an_epoch(
    packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TASKS, "sft", replace(TASKS["sft"], rows=RowSpec(kind=lambda _: "pairs")))
    twin, cell = twin_of(tmp_path), Cell("", {}, accumulation=16, train={"pack": packed})
    loaded = load_job(twin.job_file(cell))
    text = open_text_side(loaded, tmp_path)
    corpus = open_corpus(loaded.job, text.codec, seq_len=text.seq_len, base=tmp_path, loaded=loaded)
    assert corpus.unit_size == 2 and loaded.job.epochs is not None
    assert corpus.sequences.total(loaded.job.epochs) == sum(twin.samples(cell))


HEAD_COUNTS = [
    (9, 3, 2),
    (15, 5, 2),
    (14, 2, 2),
    (12, 4, 3),
    (32, 8, 3),
    (64, 8, 16),
    (71, 1, 1),
    (25, 5, 4),
    (10, 10, 4),
]


@pytest.mark.parametrize(("query", "keys", "processes"), HEAD_COUNTS)
def test_heads_share_out_as_those_of_the_job(query: int, keys: int, processes: int) -> None:
    whole = AutoConfig.for_model(
        "llama", num_attention_heads=query, num_key_value_heads=keys, hidden_size=query * 8, intermediate_size=1000
    )
    small = shrunk(whole, ToyShape(tensor=processes))
    assert small.num_attention_heads <= query and small.num_key_value_heads <= keys
    assert small.num_attention_heads % processes == query % processes
    assert small.num_key_value_heads % processes == keys % processes
    assert (small.num_key_value_heads < processes) == (keys < processes)
    assert (small.num_key_value_heads == small.num_attention_heads) == (keys == query)
    assert small.intermediate_size % processes == 1000 % processes
    possible = [share_heads(config, processes, 0) is None for config in (small, whole)]
    assert possible[0] == possible[1]


@pytest.mark.parametrize(("experts", "processes"), [(60, 4), (6, 4), (5, 2), (8, 3)])
def test_experts_share_out_as_those_of_the_job(experts: int, processes: int) -> None:
    small = shrunk(AutoConfig.for_model("qwen3_moe", num_experts=experts), ToyShape(tensor=processes))
    assert small.num_experts % processes == experts % processes and small.num_experts >= max(4, processes)


def test_a_head_is_tied_as_the_jobs(tmp_path: Path) -> None:
    for tied in (True, False):
        assert shrunk(AutoConfig.for_model("llama", tie_word_embeddings=tied), ToyShape()).tie_word_embeddings == tied


def test_a_twin_trains_as_its_job_does(tmp_path: Path) -> None:
    twin = twin_of(
        tmp_path,
        "task: pretrain\nseed: 3\n"
        "tune: {method: qlora, rank: 64, alpha: 32, dropout: 0.1, targets: [q_proj], rslora: true}\n"
        "train: {optimizer: sgd, beta1: 0.8, schedule: wsd, min_lr: 0.25, weight_decay: 0.3, clip: 0, pack: true}",
    )
    cell = Cell("", {}, accumulation=3)
    job = load_job(twin.job_file(cell, LayoutVariant(by_steps=True))).job
    train = job.train
    assert (job.task, job.seed, job.steps) == ("pretrain", 3, 8)
    assert (train.optimizer, train.beta1, train.weight_decay) == ("sgd", 0.8, 0.3)
    assert (train.schedule, train.min_lr, train.warmup) == ("wsd", 0.25, 0.25)
    assert (train.clip, train.pack, train.accumulation, train.batch) == (0.0, True, 3, 6)
    assert (job.tune.method, job.tune.targets, job.tune.rslora, job.tune.dropout) == ("lora", ["q_proj"], True, 0.0)
    assert job.tune.alpha == job.tune.rank / 2  # as 32 is half of 64
    assert load_job(twin.job_file(cell, LayoutVariant(dropout=True))).job.tune.dropout == 0.1
    assert twin.dropout == {0.1} and not twin.clips
    assert len(twin.facts) == 1 and "quantised" in twin.facts[0]


def test_a_job_without_warm_up_has_a_twin_without(tmp_path: Path) -> None:
    twin = twin_of(tmp_path, "task: sft\ntrain: {warmup: 0}")
    assert load_job(twin.job_file(Cell("", {}))).job.train.warmup == 0


def test_the_models_dropout_is_known_and_can_be_at_work(tmp_path: Path) -> None:
    twin = twin_of(tmp_path, family="gpt2", attn_pdrop=0.3, embd_pdrop=0.0)
    assert twin.dropout == {0.1, 0.3}
    configs = [
        AutoConfig.from_pretrained(load_job(twin.job_file(Cell("", {}), LayoutVariant(dropout=on))).job.model.name)  # type: ignore[union-attr]
        for on in (False, True)
    ]
    assert [config.attn_pdrop for config in configs] == [0.0, 0.3]


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("accumulation", [1, 7])
@pytest.mark.parametrize("task", ["sft", "pretrain"])
def test_the_last_batch_is_short_and_an_epoch_ends_within_the_run(
    task: str, accumulation: int, pack: bool, tmp_path: Path
) -> None:
    twin = twin_of(tmp_path, f"task: {task}\ntrain: {{pack: {pack}}}")
    cell = Cell("", {"data": 2}, accumulation=accumulation)
    loaded = load_job(twin.job_file(cell))
    text = open_text_side(loaded, tmp_path)
    corpus = open_corpus(loaded.job, text.codec, seq_len=text.seq_len, base=tmp_path, loaded=loaded)
    assert loaded.job.epochs is not None and loaded.job.steps is None
    total, batch = corpus.sequences.total(loaded.job.epochs), 4 * accumulation
    assert total == sum(twin.samples(cell)) and 0 < total % batch <= batch // 2
    assert pack or batch < corpus.sequences.total(1) < total - batch

    sources = [read(str(path), CHARACTERS, END_ID, text.seq_len) for path in twin.rows(cell)]
    capacity = text.seq_len if pack else None
    batches = batches_of(sources, twin.samples(cell), seed=loaded.job.seed, capacity=capacity)
    taken = [document.row for index in range(total) for document in corpus.sequences[index]]
    expected = [row for step in batches for sample in step for row in sample]
    assert len(taken) == len(expected)
    for row, (ids, mask) in zip(taken, expected, strict=True):  # what the documentation says of the order
        assert row.ids.tolist() == ids.tolist() and row.trained[1:].tolist() == mask[1:].tolist()


def test_every_pass_of_a_step_is_there(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "task: sft\nmodel: some/model\ndata: none.jsonl\ntrain: {batch: 120, accumulation: 60, micro_batch: 1}\n"
        "parallel: {data: 2}\n"
    )
    cell = job_case(load_job(path))
    assert cell.batch == {"batch": 120, "micro_batch": 1, "accumulation": 60}
    twin = twin_of(tmp_path)
    assert (twin.steps(cell), twin.seq_len(cell)) == (3, SEQ_LEN)  # fewer steps
    assert (twin.steps(Cell("", {})), twin.seq_len(Cell("", {}, accumulation=200))) == (5, 16)  # shorter rows


def test_the_jobs_own_layout_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "task: sft\nmodel: some/model\ndata: none.jsonl\ntrain: {batch: 64, accumulation: 16}\n"
        "parallel: {data: 2, pipeline: 3, stages: [9, 12, 9], devices: [0, 1, 2, 3, 4, 5]}\n"
    )
    cell = job_case(load_job(path))
    assert cell.parallel == {"data": 2, "pipeline": 3, "stages": [1, 2, 1]}
    assert (cell.world, cell.blocks) == (6, 4)
    assert cell.batch == {"batch": 64, "micro_batch": 2, "accumulation": 16}


@pytest.mark.parametrize(
    "tune", ["{method: prefix, projection: false}", "prefix", "qlora", "{method: p-tuning, deep: true}"]
)
def test_the_twin_has_the_keys_of_its_tuning(tune: str, tmp_path: Path) -> None:
    twin = twin_of(tmp_path, f"task: sft\ntune: {tune}")
    assert load_job(twin.job_file(Cell("", {}))).job.tune.method == twin.base["tune"]["method"]
    assert ("width" in twin.base["tune"]) == (tune == "prefix")


def test_every_layout_of_the_matrix_is_well_formed(tmp_path: Path) -> None:
    twin = twin_of(tmp_path)
    for cell in MATRIX:
        load_job(twin.job_file(cell))
    assert max(cell.world for cell in MATRIX) == 8


@pytest.mark.slow
def test_accumulation_changes_nothing_and_another_beta_does(tmp_path: Path) -> None:
    twin = twin_of(tmp_path)
    cell = Cell("", {}, accumulation=4)
    reference = run_and_trace(str(twin.job_file(reference_of(cell))), last=5)
    assert reference is not None and len(reference.losses) == 5
    assert [step for step, name in reference.numbers if name == "evaluation loss"] == [0, 2, 4, 5]
    other = run_and_trace(str(twin.job_file(cell)), last=5)
    assert other is not None and other.losses is not reference.losses
    assert compare(other, reference).first_beyond(1e-12) is None

    wrong = run_and_trace(str(twin.job_file(Cell("", {}, accumulation=4, train={"beta2": 0.998}))), last=5)
    assert wrong is not None
    found = compare(wrong, reference)
    assert found.size("loss") > 1e-8
    assert "step 1" not in (found.first_beyond(1e-10) or "step 1")  # only the second step knows of the first


@pytest.mark.parametrize(
    ("family", "text", "limit"),
    [
        ("llama4_text", "task: sft", 0.0),
        ("glm4_moe", "task: sft", 0.0),  # its routers have buffers
        ("gemma4_text", "task: sft\ntrain: {router_aux_loss: 0.1}", 0.0),
        ("llama", "task: sft", 15.0),
        ("gpt2", "task: pretrain\ntrain: {weight_decay: 0.3, schedule: wsd, min_lr: 0.2}", 2.0),
        ("qwen3", "task: sft\ntune: {method: lora, rslora: true, loraplus_ratio: 8}\ntrain: {schedule: linear}", 10.0),
        ("llama", "task: sft\ntrain: {optimizer: sgd, pack: true, clip: 0}", 0.0),
        ("gemma2", "task: sft", 0.0),
        ("llama", "task: sft\ntune: {method: lora, dora: true, modules_to_save: [lm_head]}", 4.0),
        ("llama", "task: sft\ntrain: {optimizer: adafactor, warmup: 0, schedule: constant}", 15.0),
        ("llama", "task: sft\ntune: prompt", 14.0),
        ("llama", "task: sft\ntune: {method: p-tuning, encoder: lstm}", 10.0),
        ("llama", "task: sft\ntune: prefix", 3.0),
        ("llama", "task: sft\ntune: {method: p-tuning, deep: true}", 0.2),
        ("llama", "task: sft\ntune: {method: full, new_rows_first: 2}", 20.0),
    ],
)
@pytest.mark.slow
def test_the_plain_loop_computes_the_same(family: str, text: str, limit: float, tmp_path: Path) -> None:
    twin = twin_of(tmp_path, text, family, steps=4, **(GEMMA4 if family == "gemma4_text" else {}))
    cell = Cell("", {}, accumulation=2)
    clip = LayoutVariant(clip=limit)
    path = twin.job_file(cell, clip)
    run = run_and_trace(str(path), last=4)
    job = load_job(path).job
    assert run is not None and why_not(twin, job, run) is None
    given = plain_job(twin, cell, job, run)
    comparison = compare(as_plain(job.tune, run), run_plain(given), without=in_other_form(twin))
    assert comparison.first_beyond(1e-10) is None, comparison.first_beyond(1e-10)
    assert len(comparison.in_order) > 28
    assert not limit or min(run.grad_norms) < limit < max(run.grad_norms), run.grad_norms


@pytest.mark.parametrize(
    ("family", "text", "why"),
    [
        ("gpt2", "task: sft\ntune: lora", "gpt2 has fused layers"),
        ("gpt2", "task: sft\ntrain: {optimizer: adafactor}", "gpt2 has fused layers"),
    ],
)
def test_what_the_plain_loop_is_not_asked_is_said(family: str, text: str, why: str, tmp_path: Path) -> None:
    twin = twin_of(tmp_path, text, family)
    assert why in (why_not(twin, loaded_job(tmp_path, text).job, None) or "")  # type: ignore[arg-type]


def test_the_plain_loop_is_short_and_its_own() -> None:
    for module in (plain_loop, plain_router_loss, plain_rows):
        source = Path(str(module.__file__)).read_text(encoding="utf-8")
        own = source.replace("from stoker.verify.plain_router_loss import balance", "").replace("`stoker", "")
        assert len(source.splitlines()) < 150 and "stoker." not in own


def test_the_rate_of_a_head_that_is_not_built_is_none_of_the_jobs() -> None:
    source = {"path": "rows.jsonl"}
    given = {"task": "sft", "model": {"name": "org/name"}, "data": [source], "steps": 2, "tune": {"method": "full"}}
    config = AutoConfig.for_model("gpt_neox", hidden_dropout=0.2)
    assert config.classifier_dropout == 0.1
    assert dropout_rates(Job.model_validate(given), config) == {0.2}
