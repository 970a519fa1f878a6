"""Plans in the words of job files and of `--on`: read back as what they were."""

from __future__ import annotations

from pathlib import Path

import pytest

from feasible_settings import feasible_settings
from stoker.hardware.machines.cluster_file import load_cluster
from stoker.job import load_job
from stoker.job.document.yaml_document import parse_document
from stoker.job.layout import Layout, layout_of
from stoker.job.load_job import check_document
from stoker.job.rollout_sizes import RolloutSizes
from stoker.plan.answer.setting_to_yaml import cluster_words, fuller_nodes, job_yaml
from stoker.plan.search import search
from stoker.plan.search_space import EVERYTHING, trainable
from stoker.plan.setting import Setting, TrainingWork
from stoker.plan.shapes.model_names import shape_named
from stoker.plan.trainable_params import Adapters

HEAD = "task: pretrain\nmodel: gpt2\ndata: none.jsonl\nsteps: 10\n"


def sample() -> list[Setting]:
    """Every kind of setting that is searched on two nodes, of each hundredth one."""
    cluster = load_cluster("2x4xA100-80GB")
    found = feasible_settings(TrainingWork(shape_named("gpt2"), 4096, 16), cluster)
    return list(found)[::29]


@pytest.mark.parametrize("setting", sample(), ids=lambda setting: f"{setting.layout.describe()}; {setting.micro_batch}")
def test_a_job_accepts_the_plan_and_has_its_layout(setting: Setting) -> None:
    """`check_document` is what `stoker check` judges a file by."""
    loaded = check_document(parse_document(HEAD + job_yaml(setting), file="job.yaml"))
    assert layout_of(loaded.job) == setting.layout
    train = loaded.job.train
    assert (train.batch, train.micro_batch, train.accumulation) == (16, setting.micro_batch, setting.micro_batches)


@pytest.mark.parametrize("name", ["fp16", "fp16 on the host", "qlora", "prompt", "recompute", "policy", "shares"])
def test_what_a_job_refuses_is_not_looked_at(name: str) -> None:
    """Each of Stoker's rules once: the job with the words is refused, and the search leaves it out."""
    shape, cluster = shape_named("gpt2"), load_cluster("2x4xA100-80GB")
    work = TrainingWork(shape, 1024, 16)
    layout, more = Layout(data=4, pipeline=2, recompute="full", schedule="zbv"), ""
    if name.startswith("fp16"):
        work, more = TrainingWork(shape, 1024, 16, precision="fp16"), "precision: fp16"
        layout = Layout(data=4, pipeline=2)
    if name == "fp16 on the host":
        layout = Layout(data=4, shard="zero3", shard_size=4, offload="params")
    if name == "qlora":
        work, layout = TrainingWork(shape, 1024, 16, tuning="qlora"), Layout(data=4, tensor=2)
    if name == "prompt":
        work = TrainingWork(shape, 1024, 16, tuning="prompt", adapters=Adapters(tokens=20))
        layout = Layout(data=4, context=2)
    if name == "policy":
        work = TrainingWork(shape, 1024, 16, rollouts=RolloutSizes(8, 2, 256, 1, 1))
        layout = Layout(data=4, pipeline=2)
    if name == "shares":
        work = TrainingWork(shape, 1024, 16, rollouts=RolloutSizes(4, 4, 256, 1, 1))
        layout = Layout(data=8)
    setting = Setting(work, cluster, layout, 1)
    assert not trainable(setting) and not EVERYTHING.has(setting)
    text = HEAD + job_yaml(setting) + (f"tune: {work.tuning}\n" if work.tuning != "full" else "")
    if more:
        text = text.replace("train:\n", f"train:\n  {more}\n")
    if work.rollouts is not None:
        sizes = f"prompts: {work.rollouts.prompts}, answers: {work.rollouts.answers}"
        text = text.replace("task: pretrain", f"task: grpo\ngrpo: {{rewards: [numeric], {sizes}}}")
    with pytest.raises(Exception, match=r"fp16|cannot be cut|made for whole|recompute|pipeline splits|be shared by"):
        check_document(parse_document(text, file="job.yaml"))
    found = search(work, cluster).plans
    assert found and all(trainable(plan.setting) for plan in found)


@pytest.mark.parametrize("words", ["4x8xH100", "2x4xA100-40GB", "3x aws-p5", "1xT4", "8xL40S", "2x gb200-nvl72"])
def test_a_cluster_is_asked_for_by_its_words(words: str) -> None:
    cluster = load_cluster(words)
    larger = cluster.with_nodes(cluster.nodes + 2)
    asked = cluster_words(larger, like=words, was=cluster)
    again = load_cluster(asked.removeprefix("--on "))
    assert (again.device, again.nodes, again.per_node) == (larger.device, larger.nodes, larger.per_node)
    assert again.network_gbs == pytest.approx(larger.network_gbs)


def test_a_clusters_file_is_changed_instead(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("device: H100\nnodes: 2\nprice: 10\n")
    cluster = load_cluster(path)
    assert cluster_words(cluster.with_nodes(3), like=str(path), was=cluster) == f"nodes: 3 in {path}"
    assert not list(fuller_nodes(cluster.with_nodes(1), like=str(path)))


def test_a_part_of_a_node_is_filled_first() -> None:
    assert [larger.per_node for larger in fuller_nodes(load_cluster("2xH100"), like="2xH100")] == [4, 8]
    assert not list(fuller_nodes(load_cluster("8xH100"), like="8xH100"))


def test_overrides_of_the_command_line_are_accepted(tmp_path: Path) -> None:
    """What `changes` offers to paste besides clusters."""
    path = tmp_path / "job.yaml"
    path.write_text(HEAD)
    job = load_job(path, ["tune=lora", "train.seq_len=256", "train.batch=24"]).job
    assert (job.tune.method, job.train.seq_len, job.train.batch) == ("lora", 256, 24)
    assert load_job(path, ["tune=qlora"]).job.tune.method == "qlora"
