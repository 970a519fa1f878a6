"""Export of a reward model as transformers' sequence classification or as peft's adapter of it, and its replay in a
fresh process.

Run as ``python -m stoker.checkpoint.export.score_export FOLDER``, this file is that process, which uses none of
Stoker's loading.

Shapes: R rows.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, TaskType
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from stoker.checkpoint.export.adapter_export import PREFIX, WEIGHTS, save_adapter
from stoker.checkpoint.export.replay import ask_afresh, reason_of_end, time_limit, with_base
from stoker.checkpoint.load_run import TunedRun
from stoker.data.corpus import open_corpus
from stoker.errors import RunFailed, UserError
from stoker.models.attention.collate import cut_after_last_target
from stoker.models.score_head import OFFSET, SCORE_OFFSET
from stoker.models.tuning.adapters import unwrap
from stoker.models.tuning.packed_experts import pack_loaded_experts
from stoker.models.tuning.quantise import compute_exactly

ROWS = 6
LONGEST = 1024  # tokens of a replayed row
TOLERANCE = {"fp32": 1e-3, "fp16": 2e-2, "bf16": 1e-1}  # largest difference of scores, relative to their size
SCORE_FILE = "score.json"  # beside an adapter, which has no config.json: arguments of `from_pretrained`, and the offset


def check_classifier(model: PreTrainedModel) -> None:
    """Raises UserError if transformers has no sequence classification of this family."""
    if type(model.config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise UserError(
            f"transformers has no sequence classification for {model.config.model_type}, so no reward model"
        )


def as_classifier(merged: PreTrainedModel, *, pad_id: int) -> PreTrainedModel:
    """Converts the model to sequence classification with one label; consumes the model.

    Args:
        merged: the model in transformers' form, with a score head.
        pad_id: padding token after the rows of a batch; the score is that of the last other token.
    """
    head, name = _head_of(merged)
    config = copy.deepcopy(merged.config)
    config.num_labels, config.pad_token_id, config.tie_word_embeddings = 1, pad_id, False
    config.get_text_config().pad_token_id = pad_id
    setattr(config, SCORE_OFFSET, float(getattr(head, OFFSET)))
    weights = {key: value for key, value in merged.state_dict().items() if not key.startswith(f"{name}.")}
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config, dtype=head.weight.dtype)
    weights["score.weight"] = head.weight.detach()
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    assert not unexpected and not missing, (missing, unexpected)
    return model.eval()


def save_score_adapter(model: nn.Module, folder: Path, base_name: str, *, pad_id: int) -> None:
    """Writes a reward model's adapter in peft's format for sequence classification, with the score head in it."""
    save_adapter(model, folder, base_name)
    head, name = _head_of(unwrap(model))
    config: Any = LoraConfig.from_pretrained(str(folder))
    config.task_type = TaskType.SEQ_CLS
    if isinstance(head, LoraLayer):  # the file has the sum
        head = copy.deepcopy(head)
        head.merge()
        head, config.target_modules = head.get_base_layer(), set(config.target_modules) - {name}
    config.modules_to_save = [*(m for m in config.modules_to_save or () if m != name), "score"]
    config.save_pretrained(str(folder))
    state = {key: t for key, t in load_file(folder / WEIGHTS).items() if not key.startswith(f"{PREFIX}{name}.")}
    state[f"{PREFIX}score.weight"] = head.weight.detach().float().cpu().contiguous()
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    said = {"num_labels": 1, "pad_token_id": pad_id, SCORE_OFFSET: float(getattr(head, OFFSET))}
    (folder / SCORE_FILE).write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")


def _head_of(model: PreTrainedModel) -> tuple[Any, str]:
    """Returns the score head and its name."""
    head: Any = model.get_output_embeddings()
    return head, next(name for name, module in model.named_modules() if module is head)


def padding_of(tuned: TunedRun) -> int:
    """Returns a padding token that ends no answer: the tokenizer's own, else another special token, else the
    first one.
    """
    codec, tokenizer = tuned.text.codec, tuned.tokenizer
    stops = {*codec.stop_ids, tokenizer.eos_token_id}
    special = [token for token, t in sorted(codec.tokenizer.get_added_tokens_decoder().items()) if t.special]
    own = [tokenizer.pad_token_id] if tokenizer.pad_token_id is not None else []
    return next((token for token in (*own, *special, 0, 1, 2) if token not in stops), 0)


def replayed_rows(tuned: TunedRun, base: Path) -> list[list[int]]:
    """Returns held-out answers with their prompts, or those of the first sequence, up to their last trained token."""
    with closing(open_corpus(tuned.job, tuned.text.codec, seq_len=tuned.text.seq_len, base=base)) as corpus:
        documents = (corpus.evaluation_documents() or corpus.sequences[0])[:ROWS]
        rows = [cut_after_last_target((d.row.ids, d.row.trained))[0][-LONGEST:] for d in documents]
        return [ids.astype(np.int64).tolist() for ids in rows]


@torch.inference_mode()
def scores_alone(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> list[float]:
    """Returns the score of each row by a model with a score head in this process, before the offset."""
    head: Any = model.get_output_embeddings()
    hidden = [
        model.base_model(input_ids=torch.tensor([list(row)], device=head.weight.device)).last_hidden_state
        for row in rows
    ]
    return [float(head(states[:, -1].to(head.weight.dtype))) for states in hidden]


@dataclass(frozen=True)
class ScoreRequest:
    """Rows to score, and of an adapter's base its path, dtype, transformers' settings of its quantisation, and whether
    its experts are packed.
    """

    rows: Sequence[Sequence[int]]
    base: str | None = None
    dtype: str | None = None
    quantisation: Mapping[str, Any] | None = None
    packs_experts: bool = False


def replay_scores(folder: Path, request: ScoreRequest) -> list[float]:
    """Returns the scores of rows in one padded batch, by the export in a fresh process.

    Raises:
        RunFailed: transformers or peft cannot load it.
    """
    limit = time_limit(folder, request.base)
    with TemporaryDirectory() as temporary:
        named = with_base(folder, request.base, Path(temporary))
        done = ask_afresh("stoker.checkpoint.export.score_export", named, asdict(request), limit)
    if done.returncode:
        raise RunFailed(f"the export cannot be loaded: {reason_of_end(done)}")
    found: list[float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def furthest(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Returns the largest difference of scores, relative to their size."""
    size = max(1.0, *(abs(score) for score in ours))
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / size


def _loaded(folder: Path, request: ScoreRequest) -> nn.Module:
    """Loads an export in float32, unless its base is quantised."""
    if not (folder / SCORE_FILE).is_file():
        return AutoModelForSequenceClassification.from_pretrained(folder).float()
    from peft import AutoPeftModelForSequenceClassification, set_peft_model_state_dict

    said = json.loads((folder / SCORE_FILE).read_text("utf-8"))
    how = {name: said[name] for name in ("num_labels", "pad_token_id")}
    if request.quantisation is not None:
        how["quantization_config"] = request.quantisation
    model: nn.Module = AutoPeftModelForSequenceClassification.from_pretrained(
        str(folder), dtype=request.dtype or "auto", **how
    )
    if request.packs_experts:
        pack_loaded_experts(model)
    compute_exactly(model)
    if request.quantisation is None:  # the base is rounded as in training, the adapter and the head are not
        set_peft_model_state_dict(model.float(), load_file(folder / WEIGHTS))
    return model


@torch.inference_mode()
def _main(folder: str) -> None:
    from transformers import AutoTokenizer

    request = ScoreRequest(**json.load(sys.stdin))
    rows = [list(row) for row in request.rows]
    model = _loaded(Path(folder), request).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.padding_side = "right"
    batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    scores = model(**{name: batch[name] for name in ("input_ids", "attention_mask")}).logits
    assert scores.shape == (len(rows), 1)
    print(json.dumps(scores[:, 0].tolist()))


if __name__ == "__main__":
    _main(sys.argv[1])
