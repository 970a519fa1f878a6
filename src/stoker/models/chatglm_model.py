"""ChatGLM2, ChatGLM3 and GLM-4 in their first format (``model_type: chatglm``), read as transformers' Glm.

Their own modelling code needs an older transformers. Their blocks are those of Glm: queries, keys and values are in one
matrix, one after another, and half of each head is rotated in pairs of neighbours. A checkpoint is read once, and then
cached as an ordinary model folder.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.errors import Problem, UserError, user_file_errors
from stoker.models.converted_folder import converted_folder
from stoker.models.model_folder import GENERATION, INDEX, read_config, weight_files
from stoker.models.tokenizers.chatglm_tokenizer import OWN_CODE, answer_ends, chatglm_tokenizer
from stoker.models.tokenizers.sentencepiece_model import FILE
from stoker.node_cache.remote_folder import PICKLED, PICKLED_INDEX
from stoker.plan.shapes.chatglm import glm_config

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import GlmConfig

KIND = "chatglm-1"
NAMES = {  # of stored tensors, without the layer
    "transformer.embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "transformer.encoder.final_layernorm.weight": "model.norm.weight",
    "transformer.output_layer.weight": "lm_head.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "post_attention_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.dense.weight": "self_attn.o_proj.weight",
    "mlp.dense_h_to_4h.weight": "mlp.gate_up_proj.weight",
    "mlp.dense_4h_to_h.weight": "mlp.down_proj.weight",
}
LAYER = re.compile(r"transformer\.encoder\.layers\.(\d+)\.(.+)")
FUSED = re.compile(r"self_attention\.query_key_value\.(weight|bias)")
DROPPED = "transformer.rotary_pos_emb.inv_freq"  # computed from the configuration


def settings_of_chatglm(folder: Path) -> Path:
    """Returns the folder with the tokenizer and the configuration of a checkpoint, in transformers' format.

    Raises:
        UserError: they cannot be read, or Glm cannot compute this model.
    """
    files = ("config.json", FILE, "tokenizer_config.json", GENERATION, OWN_CODE)

    def convert(to: Path) -> None:
        config = _config(folder)
        if (folder / FILE).is_file():  # else the job names another tokenizer
            tokenizer = chatglm_tokenizer(folder)
            tokenizer.save_pretrained(to)
            config.eos_token_id, config.pad_token_id = answer_ends(tokenizer), tokenizer.pad_token_id
        config.save_pretrained(to)
        (to / GENERATION).write_text(json.dumps({"eos_token_id": config.eos_token_id}))

    present = [folder / name for name in files if (folder / name).is_file()]
    return converted_folder(KIND, present, "settings", convert)


def weights_of_chatglm(folder: Path, *, allow_pickle: bool = False) -> Path:
    """Returns the folder of a whole checkpoint in transformers' format.

    Raises:
        UserError: they cannot be read, Glm cannot compute this model, or all its weights are pickled and that is not
            allowed.
    """
    files = weight_files(folder)
    if not files and allow_pickle:
        files = _pickled_files(folder)
    if not files:
        message = f"the model {folder} cannot be loaded: it has no .safetensors file"
        raise UserError(Problem(message, "write model.allow_pickle: true if its files are .bin and you trust them"))

    def convert(to: Path) -> None:
        from safetensors.torch import save_file

        shutil.copytree(settings_of_chatglm(folder), to, dirs_exist_ok=True)
        config = _config(folder)
        where: dict[str, str] = {}
        size = 0
        for number, file in enumerate(files, 1):
            tensors = dict(_converted(file, config))
            name = f"model-{number:05}-of-{len(files):05}.safetensors"
            save_file(tensors, to / name, {"format": "pt"})
            where |= dict.fromkeys(tensors, name)
            size += sum(tensor.nbytes for tensor in tensors.values())
        (to / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": where}))

    return converted_folder(KIND, [folder / "config.json", *files], "weights", convert)


def _config(folder: Path) -> GlmConfig:
    from transformers import GlmConfig

    values = glm_config(read_config(folder), str(folder / "config.json"))
    return GlmConfig(**{key: value for key, value in values.items() if key != "model_type"})


def _pickled_files(folder: Path) -> list[Path]:
    if (folder / PICKLED).is_file():
        return [folder / PICKLED]
    with user_file_errors(f"{folder / PICKLED_INDEX}"):
        names = sorted(set(json.loads((folder / PICKLED_INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    return [folder / Path(name).name for name in names]


def _converted(file: Path, config: GlmConfig) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a file by Glm's names."""
    import torch
    from safetensors.torch import load_file

    with user_file_errors(f"the weights {file}"):
        if file.suffix == ".safetensors":
            stored = load_file(file)
        else:
            stored = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    rows = [(count or 0) * (config.head_dim or 0) for count in heads]  # of queries, keys and values
    for name, tensor in stored.items():
        in_layer = LAYER.fullmatch(name)
        prefix, inner = (f"model.layers.{in_layer[1]}.", in_layer[2]) if in_layer else ("", name)
        if fused := FUSED.fullmatch(inner):
            if len(tensor) != sum(rows):
                asked = f"and its configuration asks for {sum(rows)}"
                raise UserError(f"the weights {file}: {name} has {len(tensor)} rows, {asked}")
            for part, values in zip("qkv", tensor.split(rows), strict=True):
                yield f"{prefix}self_attn.{part}_proj.{fused[1]}", values.contiguous()
        elif inner in NAMES:
            yield f"{prefix}{NAMES[inner]}", tensor.contiguous()
        elif inner != DROPPED:
            raise UserError(f"the weights {file}: {name} is no tensor of ChatGLM2, ChatGLM3 or GLM-4")
