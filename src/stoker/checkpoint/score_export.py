"""Export of a reward model as transformers' sequence classification, and its replay in a fresh process.

Run as ``python -m stoker.checkpoint.score_export FOLDER``, this file is that process, which uses none of Stoker's
loading.

Shapes: R rows.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from stoker.checkpoint.load_run import TunedRun
from stoker.checkpoint.replay import time_limit
from stoker.data.corpus import open_corpus
from stoker.errors import RunFailed, UserError
from stoker.models.collate import trim
from stoker.models.score_head import OFFSET

ROWS = 6
LONGEST = 1024  # tokens of a replayed row
TOLERANCE = {"fp32": 1e-3, "fp16": 2e-2, "bf16": 1e-1}  # largest difference of scores, relative to their size
SCORE_OFFSET = "score_offset"  # key of config.json: offset to subtract from the scores, so that demonstrations score 0


def check_classifier(model: PreTrainedModel) -> None:
    """Raises: UserError: transformers has no sequence classification of this family."""
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
    head: Any = merged.get_output_embeddings()
    config = copy.deepcopy(merged.config)
    config.num_labels, config.pad_token_id, config.tie_word_embeddings = 1, pad_id, False
    config.get_text_config().pad_token_id = pad_id
    setattr(config, SCORE_OFFSET, float(getattr(head, OFFSET)))
    name = next(name for name, module in merged.named_modules() if module is head)
    weights = {key: value for key, value in merged.state_dict().items() if not key.startswith(f"{name}.")}
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config, dtype=head.weight.dtype)
    weights["score.weight"] = head.weight.detach()
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    assert not unexpected and not missing, (missing, unexpected)
    return model.eval()


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
    corpus = open_corpus(tuned.job, tuned.text.codec, seq_len=tuned.text.seq_len, base=base)
    documents = (corpus.evaluation_documents() or corpus.sequences[0])[:ROWS]
    rows = [trim((d.row.ids, d.row.trained))[0][-LONGEST:].astype(np.int64).tolist() for d in documents]
    corpus.close()
    return rows


@torch.inference_mode()
def scores_alone(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> list[float]:
    """Returns the score of each row by a model with a score head in this process, before the offset."""
    head: Any = model.get_output_embeddings()
    hidden = [
        model.base_model(input_ids=torch.tensor([list(row)], device=head.weight.device)).last_hidden_state
        for row in rows
    ]
    return [float(head(states[:, -1].to(head.weight.dtype))) for states in hidden]


def replay_scores(folder: Path, rows: Sequence[Sequence[int]]) -> list[float]:
    """Returns the scores of rows in one padded batch, by the export in a fresh process.

    Raises:
        RunFailed: transformers cannot load it.
    """
    command = [sys.executable, "-P", "-m", "stoker.checkpoint.score_export", str(folder)]
    asked, limit = json.dumps([list(row) for row in rows]), time_limit(folder, None)
    try:
        done = subprocess.run(command, input=asked, capture_output=True, text=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired as error:
        raise RunFailed(f"the export gave no answer within {limit:.0f} s in a fresh process") from error
    if done.returncode:
        raise RunFailed(f"the export cannot be loaded: {done.stderr.strip().splitlines()[-1]}")
    found: list[float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def furthest(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Returns the largest difference of scores, relative to their size."""
    size = max(1.0, *(abs(score) for score in ours))
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / size


@torch.inference_mode()
def _main(folder: str) -> None:
    from transformers import AutoTokenizer

    rows = json.load(sys.stdin)
    model = AutoModelForSequenceClassification.from_pretrained(folder).float().eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.padding_side = "right"
    batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    scores = model(**{name: batch[name] for name in ("input_ids", "attention_mask")}).logits
    assert scores.shape == (len(rows), 1)
    print(json.dumps(scores[:, 0].tolist()))


if __name__ == "__main__":
    _main(sys.argv[1])
