"""An exported GGUF against the model and tokenizer it was made from, through transformers and llama.cpp."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from gguf_of_folder import gguf_of_folder
from stoker.checkpoint.export.gguf_families import gguf_problem
from stoker.checkpoint.export.gguf_replay import ask_llamacpp
from stoker.checkpoint.export.replay import NEW_TOKENS, ReplayRequest, ReplayRow, answer_afresh
from stoker.checkpoint.export.text_check import check_gguf_stops
from stoker.errors import RunFailed, UserError
from stoker.models import pre_tokenizers as llama_cpp

VOCAB = 420  # more than the tokenizer's ids, so that the writer has to fill the list up
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind: 12, 345 and 6789 times.",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))\t# 3",
    "Größe, naïve, façade; 你好，世界。 Здравствуй, мир! 🙂🔥",
] * 4
NASTY = [
    "Hello, world!",
    " leading and  double  blanks ",
    "\n\n\r\n\ttabs\t\tand\n lines\n",
    "a1b22c333 4444  55555",
    "I'LL they'll don't 'tis",
    "Größe naïve cafe\u0301 你好，世界 🙂👩‍👩‍👧 \u200b\u00a0x",
    "<|im_start|>user\nhi there<|im_end|>\n<tool>call</tool>",
    "<|im_end|><|im_end|>x <|im_start",
    "😀" * 3 + "\x00\x7f",
]
TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PROMPTS = [
    [5, 80, 33, 17, 200, 9],
    [300],
    [44, 45, 46, 300, 12, 12, 12, 7, 90, 91, 250, 3],
    [7, 8],
    [50, 51, 52],
]

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    # Larger than usual, so that a random model's greedy choices are far apart.
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE, tie_word_embeddings=False)),
    "llama-tied": (
        LlamaForCausalLM,
        LlamaConfig(**SHAPE, tie_word_embeddings=True, rms_norm_eps=1e-5, head_dim=32),
    ),
    "llama-linear": (
        LlamaForCausalLM,
        LlamaConfig(**SHAPE, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}),
    ),
    "llama-llama3": (LlamaForCausalLM, LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE)),
    "mistral": (MistralForCausalLM, MistralConfig(**SHAPE, sliding_window=64)),
    "qwen2": (
        Qwen2ForCausalLM,
        Qwen2Config(**SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 12345.0}),
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=128)),
    "qwen3-small-heads": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=16)),
}


def _model(kind: str) -> Any:
    torch.manual_seed(0)
    build, config = MODELS[kind]
    model = build(copy.deepcopy(config))
    with torch.no_grad():
        for parameter in model.parameters():  # a bias of zeros or a norm of ones would hide that it is lost
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def _split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


SPLITTERS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama-bpe": _split(llama_cpp.LLAMA3),
    "smaug-bpe": _split(llama_cpp.LLAMA3),
    "qwen2": _split(llama_cpp.QWEN2),
    "tekken": _split(llama_cpp.TEKKEN),
}


def _tokenizer(pre: str = "gpt-2") -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken")))
    raw.pre_tokenizer = SPLITTERS[pre]
    raw.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<pad>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(CORPUS, trainer)
    raw.add_tokens([AddedToken("<tool>", normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<pad>",
        chat_template=TEMPLATE,
    )


def _folder(path: Path, kind: str, pre: str = "gpt-2") -> tuple[Path, Any]:
    model = _model(kind)
    model.save_pretrained(path)
    _tokenizer(pre).save_pretrained(path)
    return path, model


def _logits(model: Any) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS]


@pytest.fixture(scope="module", params=["llama", "llama-tied", "mistral", "qwen2", "qwen3"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder, model = _folder(tmp_path_factory.mktemp("model") / request.param, request.param)
    return folder, model


def _rounded(model: Any, kind: Any) -> Any:
    """What the file's type costs is known: the matrices, rounded. Nothing else may differ."""
    from gguf.quants import dequantize, quantize

    model = copy.deepcopy(model)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            weight = parameter.detach().numpy()
            parameter.data = torch.from_numpy(dequantize(quantize(weight, kind), kind))
    return model


@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0"])
def test_transformers_computes_the_same_logits(exported: tuple[Path, Any], dtype: Any, tmp_path: Path) -> None:
    folder, model = exported
    gguf_of_folder(folder, tmp_path / "model.gguf", dtype=dtype)
    kind = gguf.GGMLQuantizationType[dtype.upper()]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).eval()
    for ours, original in zip(_logits(loaded), _logits(_rounded(model, kind)), strict=True):
        assert (ours - original).abs().max() < 1e-4
    kinds = {t.name: t.tensor_type for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert kinds["blk.0.attn_q.weight"] == kind
    assert kinds["blk.0.attn_norm.weight"] == gguf.GGMLQuantizationType.F32


def _greedy(model: Any, prompt: list[int], steps: int) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(steps):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
            if tokens[-1] == 1:
                break
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    "kind",
    ["llama", "llama-tied", "llama-linear", "llama-llama3", "mistral", "qwen2", "qwen3", "qwen3-small-heads"],
)
@pytest.mark.often("llama", "qwen3")
def test_llamacpp_continues_as_transformers(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    folder, model = _folder(tmp_path / "model", kind)
    gguf_of_folder(folder, tmp_path / "model.gguf", dtype="f32")
    greedy = [_greedy(model, prompt, NEW_TOKENS) for prompt in PROMPTS]
    rows = [ReplayRow((*p, *t), len(p), tuple(range(len(p + t) - 1))) for p, t in zip(PROMPTS, greedy, strict=True)]
    answers = ask_llamacpp(tmp_path / "model.gguf", ReplayRequest(rows, (), ()))
    assert answers.tokens == greedy
    for row, scores in zip(rows, answers.scores, strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([row.ids])).logits[0].log_softmax(-1)
        for position, score in zip(row.positions, scores, strict=True):
            assert score == pytest.approx(expected[position, row.ids[position + 1]].item(), abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [1, 300])
def test_both_programs_stop_at_the_stop_token(stop: int, tmp_path: Path) -> None:
    """<|im_end|>, and an ordinary token that the run names."""
    pytest.importorskip("xllamacpp")
    model = _model("llama")
    with torch.no_grad():  # every state now points at the stop token
        model.lm_head.weight.zero_()
        model.model.norm.weight.zero_()
        model.model.norm.weight[0] = 1.0
        model.model.embed_tokens.weight[:, 0] = 50.0
        model.lm_head.weight[stop, 0] = 1.0
    model.save_pretrained(tmp_path / "model")
    _tokenizer().save_pretrained(tmp_path / "model")
    gguf_of_folder(tmp_path / "model", tmp_path / "model.gguf", dtype="f32", stops=(1, stop))
    request = ReplayRequest([ReplayRow((5, 80, 33, 1), 3, (2,))], (stop,), ())
    assert ask_llamacpp(tmp_path / "model.gguf", request).tokens == [[stop]]
    answers, _ = answer_afresh(tmp_path / "model.gguf", request)
    assert [answer.tokens for answer in answers] == [(stop,)]


def _encodes_and_renders(tmp_path: Path, pre: str, program: Any) -> None:
    folder, _ = _folder(tmp_path / "model", "llama", pre)
    gguf_of_folder(folder, tmp_path / "model.gguf")
    turns = [("system", "Be brief."), ("user", "Hi <b>"), ("assistant", "Ho"), ("user", "你好\n\n")]
    conversations = [[{"role": role, "content": content} for role, content in turns]]
    texts, rendered = program(tmp_path / "model.gguf", ReplayRequest((), (), NASTY, conversations))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert rendered == [
        tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in conversations
    ]
    for text, ids in zip(NASTY, texts, strict=True):
        assert ids == tokenizer(text)["input_ids"], text


@pytest.mark.parametrize("pre", SPLITTERS)
def test_llamacpp_encodes_and_renders_as_the_tokenizer(pre: str, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")

    def llamacpp(file: Path, request: ReplayRequest) -> tuple[Any, Any]:
        answers = ask_llamacpp(file, request)
        return answers.texts, answers.rendered

    _encodes_and_renders(tmp_path, pre, llamacpp)


@pytest.mark.slow
def test_transformers_encodes_and_renders_as_the_tokenizer(tmp_path: Path) -> None:
    def transformers(file: Path, request: ReplayRequest) -> tuple[Any, Any]:
        _, said = answer_afresh(file, request)
        return said.texts, said.rendered

    _encodes_and_renders(tmp_path, "gpt-2", transformers)


def test_special_tokens_and_template_are_inside(tmp_path: Path) -> None:
    folder, _ = _folder(tmp_path / "mistral", "mistral")
    gguf_of_folder(folder, tmp_path / "model.gguf", stops=(1, 2))
    fields = {k: f.contents() for k, f in gguf.GGUFReader(tmp_path / "model.gguf").fields.items()}
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    tool = _tokenizer().convert_tokens_to_ids("<tool>")
    assert len(tokens) == len(types) == VOCAB
    assert (tokens[1], types[1]) == ("<|im_end|>", gguf.TokenType.CONTROL)
    assert (tokens[tool], types[tool]) == ("<tool>", gguf.TokenType.USER_DEFINED)
    assert (tokens[-1], types[-1]) == (f"[PAD{VOCAB - 1}]", gguf.TokenType.UNUSED)
    ids = {k: fields.get(f"tokenizer.ggml.{k}_token_id") for k in ("bos", "eos", "padding", "eot", "eom")}
    assert ids == {"bos": 0, "eos": 1, "padding": 2, "eot": 2, "eom": None}
    assert fields["tokenizer.ggml.add_bos_token"] is False
    assert fields["tokenizer.chat_template"] == TEMPLATE
    assert fields["llama.context_length"] == 64  # the sliding window
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith("partial")] == []


def _edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | changes), "utf-8")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["OPTForCausalLM"], "model_type": "opt"}, "OPTForCausalLM is none of"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "'yarn'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantised"),
    ],
)
def test_refuses_what_gguf_cannot_say(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder, _ = _folder(tmp_path / "model", "llama")
    _edit(folder / "config.json", **changes)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    assert reason in (gguf_problem(config) or "")


@pytest.mark.parametrize(
    ("part", "value", "reason"),
    [
        ("pre_tokenizer", {"type": "Whitespace"}, "not byte-level"),
        ("pre_tokenizer", json.loads(_split("[a-z]+").__getstate__()), "no known pre-tokenizer"),
        ("normalizer", {"type": "Lowercase"}, "normalizer Lowercase"),
    ],
)
def test_refuses_tokenizers_llamacpp_does_not_know(part: str, value: Any, reason: str, tmp_path: Path) -> None:
    folder, _ = _folder(tmp_path / "model", "llama")
    _edit(folder / "tokenizer.json", **{part: value})
    with pytest.raises(UserError, match=reason):
        gguf_of_folder(folder, tmp_path / "out" / "model.gguf")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("value", "reason"), [(float("nan"), "not finite"), (1e5, "float16")])
def test_a_weight_that_does_not_fit_leaves_nothing_behind(value: float, reason: str, tmp_path: Path) -> None:
    model = _model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] = value
    model.save_pretrained(tmp_path / "model")
    _tokenizer().save_pretrained(tmp_path / "model")
    with pytest.raises(RunFailed, match=reason):
        gguf_of_folder(tmp_path / "model", tmp_path / "out" / "model.gguf")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_broken_file_is_reported_not_raised_through(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(RunFailed, match=r"broken\.gguf cannot be replayed through llama\.cpp"):
        ask_llamacpp(tmp_path / "broken.gguf", ReplayRequest((), (), ()))


def test_stop_tokens_of_a_run_are_inside_also_ordinary_ones(tmp_path: Path) -> None:
    folder, _ = _folder(tmp_path / "model", "llama")
    file = tmp_path / "model.gguf"
    gguf_of_folder(folder, file, stops={1, 300})
    fields = {k: f.contents() for k, f in gguf.GGUFReader(file).fields.items()}
    assert fields["tokenizer.ggml.eos_token_id"] == 1 and fields["tokenizer.ggml.eot_token_id"] == 300
    check_gguf_stops((1, 300), file)
    with pytest.raises(RunFailed, match=r"stops differently: at \[1, 300\], trained \[1, 301\]"):
        check_gguf_stops((1, 301), file)
    with pytest.raises(UserError, match="4 stop tokens are more than the three a GGUF can name"):
        gguf_of_folder(folder, file, stops={1, 300, 301, 302})
