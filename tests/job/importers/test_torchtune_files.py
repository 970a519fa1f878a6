"""torchtune's files: blocks by component."""

from __future__ import annotations

import pytest
from foreign import TORCHTUNE, checked, lost, written

from stoker.errors import UserError
from stoker.job.blocks.source_block import TemplateBlock
from stoker.job.importers import import_files


def test_torchtune_s_values_and_defaults() -> None:
    imported = import_files([written(TORCHTUNE)])
    job = checked(imported).job
    assert job.model is not None
    assert (job.task, job.model.name, job.output) == ("sft", "org/llama-8b", "out/lora")
    assert job.tune.targets == ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert (job.data[0].path, job.data[0].template) == ("yahma/alpaca-cleaned", "plain")
    assert (job.train.lr, job.train.schedule, job.train.warmup, job.train.clip) == (3e-4, "cosine", 100, 0.0)
    assert (job.train.micro_batch, job.train.accumulation, job.epochs) == (2, 8, 1.0)
    assert lost(imported) == set() and job.data[0].train_on == "everything"  # the default of alpaca's builder
    assert next(i.value for i in imported.dropped if i.key == "metric_logger.log_dir") == "out/lora/logs"


def test_torchtune_distributed_chat_and_other_recipes() -> None:
    chat = (
        "dataset:\n  _component_: torchtune.datasets.chat_dataset\n  source: json\n  data_files: talk.json\n"
        "  conversation_column: dialog\n  conversation_style: sharegpt\n  packed: True\n"
    )
    start, rest = TORCHTUNE.split("dataset:\n")
    text = start + chat + rest.split("packed: False\n")[1] + "fsdp_cpu_offload: True\ntensor_parallel_dim: 2\n"
    job = checked(import_files([written(text)], processes=8)).job
    assert (job.data[0].path, job.data[0].format) == ("talk.json", "sharegpt")
    assert job.data[0].columns == {"conversations": "dialog"}
    assert (job.parallel.data, job.parallel.tensor, job.parallel.shard) == (4, 2, "zero3")
    assert (job.parallel.offload, job.train.pack) == ("params", True)
    dpo = TORCHTUNE.replace("torchtune.modules.loss.LinearCrossEntropyLoss", "torchtune.rlhf.loss.DPOLoss")
    with pytest.raises(UserError, match="the keys of torchtune's `dpo` are not carried yet"):
        import_files([written(dpo)])


def test_torchtune_s_masks_and_texts() -> None:
    template = "  prompt_template:\n    user: ['Q: ', '\\nA: ']\n    assistant: ['', '\\n']\n"
    text = TORCHTUNE.replace("tokenizer:\n", "tokenizer:\n" + template.replace("'", '"'))
    text = text.replace("dataset:\n", "dataset:\n  masking_strategy: train_on_last\n", 1)
    imported = import_files([written(text)])
    source = checked(imported).job.data[0]
    assert source.train_on == "last" and lost(imported) == set()
    assert source.template == TemplateBlock(system="{content}", user="Q: {content}\nA: ", assistant="{content}\n")
    coded = text.replace(
        template.replace("'", '"'), "  prompt_template: mine.Template\n  special_tokens_path: a.json\n"
    )
    assert lost(import_files([written(coded)])) == {"tokenizer.prompt_template", "tokenizer.special_tokens_path"}
