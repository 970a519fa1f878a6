"""The models that the benchmarks of GPUs train, with random weights, and their rows."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch

WORDS, RANK = 1000, 16


@dataclass(frozen=True)
class Shape:
    """A Llama, the rows it is trained on, about how many documents a row has, and how: ``full``, ``lora`` or
    ``qlora``."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    mlp_width: int
    length: int
    batch: int
    micro_batch: int
    tune: str
    recompute: str = "none"
    documents: int = 1

    @property
    def lora(self) -> bool:
        """Whether adapters are trained, and the base is not."""
        return self.tune != "full"

    @property
    def document(self) -> int:
        """Mean tokens of a document."""
        return self.length // self.documents

    @property
    def matrix_weights(self) -> int:
        """Weights that each token is multiplied with: all but the embedding and the norms."""
        attention = 2 * self.width**2 + 2 * self.width * (self.width * self.kv_heads // self.heads)
        return self.layers * (attention + 3 * self.width * self.mlp_width) + self.vocabulary * self.width

    def flop_per_token(self) -> float:
        """Forward and backward: 2 a weight forward, 2 for the input's gradient, 2 for the weight's unless it is frozen;
        causal attention 2 x document x width a layer forward and twice that backward (Chowdhery et al., 2022, appendix
        B, halved for the causal mask)."""
        return (4 if self.lora else 6) * self.matrix_weights + 6 * self.layers * self.document * self.width


SHAPES = {
    "pretrain-1b": Shape(32000, 2048, 22, 32, 4, 5632, 4096, 4, 4, "full"),
    "short-1b": Shape(32000, 2048, 22, 32, 4, 5632, 8192, 2, 2, "full", documents=32),
    "lora-8b": Shape(128256, 4096, 32, 32, 8, 14336, 4096, 2, 1, "lora"),
    "qlora-8b": Shape(128256, 4096, 32, 32, 8, 14336, 2048, 1, 1, "qlora", recompute="full"),
}
TINY = {"vocabulary": 1024, "width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "mlp_width": 128, "length": 64}


def make_model(folder: Path, shape: Shape, device: torch.device, template: str | None = None) -> None:
    """A model folder with random weights and a tokenizer of a thousand words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.mlp_width,
        max_position_embeddings=shape.length + 1,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=WORDS,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        LlamaForCausalLM(config).save_pretrained(folder / "model")
    torch.set_default_dtype(torch.float32)
    names = [*(f"w{i}" for i in range(WORDS - 3)), "user", "assistant", "<pad>", "</s>"]
    backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="</s>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder / "model")


def make_inputs(folder: Path, shape: Shape, rows: int, device: torch.device) -> None:
    """A model folder, and documents: as long as a row, or of half to one and a half of their mean length."""
    make_model(folder, shape, device)
    words = random.Random(0)
    with (folder / "rows.jsonl").open("w") as out:
        for _ in range(rows * shape.documents):
            spread = shape.document // 2 if shape.documents > 1 else 0
            length = shape.document + words.randint(-spread, spread)
            text = " ".join(f"w{words.randrange(WORDS - 3)}" for _ in range(length))  # and the end token
            out.write(json.dumps({"text": text}) + "\n")
