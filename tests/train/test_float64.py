"""``train.precision: fp64`` is float64 everywhere: beside a plain loop that shares no code, and in every family.

Shapes: T tokens, D width, H heads, K head size, E experts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from running import run
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast

from stoker.checkpoint.load_run import open_run
from stoker.evaluate.measure_run import measure
from stoker.examples import digits
from stoker.train.task import Part
from stoker.train.trainer import Trainer
from stoker.verify.toy_config import ToyShape, shrunk

FAMILIES = (  # noqa: SIM905
    "gpt2 bloom opt gpt_neo gptj gpt_neox falcon llama qwen2 qwen3 mistral gemma2 gemma3_text glm glm4 phi phi3 "
    "cohere granite mixtral qwen2_moe qwen3_moe gpt_oss"
).split()
STEPS, LR, DECAY, BETAS, EPS, CLIP = 20, 1e-2, 0.1, (0.9, 0.999), 1e-8, 0.5
BALANCE = 0.03
JOB: dict[str, Any] = {
    "task": "sft", "data": "rows.jsonl", "steps": STEPS, "output": "run", "evaluate": {"fraction": 0.0},
    "train": {
        "batch": 4, "lr": LR, "beta2": BETAS[1], "seq_len": 64, "precision": "fp64", "schedule": "constant",
        "warmup": 0, "weight_decay": DECAY, "clip": CLIP,
    },
}  # fmt: skip


def model_in(folder: Path, tiny_model: Path, family: str, **changes: Any) -> Path:
    """A random model of a family with the tokenizer of the tests."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_model)
    tokenizer.save_pretrained(folder)
    config = shrunk(AutoConfig.for_model(family, **changes), ToyShape(blocks=2))
    config.vocab_size, config.eos_token_id = len(tokenizer), tokenizer.eos_token_id
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


class Plain:
    """A Llama or a Mixtral by hand, one document at a time, every number in float64."""

    def __init__(self, folder: Path) -> None:
        self.routed: list[tuple[Tensor, Tensor]] = []
        self.config: Any = PretrainedConfig.from_pretrained(folder)
        stored = load_file(folder / "model.safetensors")
        self.weights = {name: w.double().requires_grad_() for name, w in stored.items()}

    def __call__(self, ids_T: Tensor) -> Tensor:
        """Logits, shape (T, vocabulary)."""
        self.routed = []
        config, w = self.config, self.weights
        x_TD = w["model.embed_tokens.weight"][ids_T]
        for number in range(config.num_hidden_layers):
            layer = f"model.layers.{number}."
            x_TD = x_TD + self.attention(self.norm(x_TD, f"{layer}input_layernorm"), f"{layer}self_attn.")
            x_TD = x_TD + self.feed_forward(self.norm(x_TD, f"{layer}post_attention_layernorm"), layer)
        head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        return self.norm(x_TD, "model.norm") @ w[head].T

    def norm(self, x_TD: Tensor, name: str) -> Tensor:
        root = (x_TD.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt()
        return x_TD * root * self.weights[f"{name}.weight"]

    def attention(self, x_TD: Tensor, name: str) -> Tensor:
        heads, pairs, tokens = self.config.num_attention_heads, self.config.num_key_value_heads, len(x_TD)
        q, k, v = (x_TD @ self.weights[f"{name}{p}_proj.weight"].T for p in "qkv")
        q_HTK, k_HTK, v_HTK = (x.view(tokens, n, -1).transpose(0, 1) for x, n in ((q, heads), (k, pairs), (v, pairs)))
        k_HTK, v_HTK = (x.repeat_interleave(heads // pairs, 0) for x in (k_HTK, v_HTK))
        q_HTK, k_HTK = self.rotated(q_HTK), self.rotated(k_HTK)
        scores = q_HTK @ k_HTK.transpose(1, 2) / q_HTK.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf)
        return (scores.softmax(-1) @ v_HTK).transpose(0, 1).reshape(tokens, -1) @ self.weights[f"{name}o_proj.weight"].T

    def rotated(self, x_HTK: Tensor) -> Tensor:
        size = x_HTK.shape[-1]
        theta = self.config.rope_parameters["rope_theta"]
        rates = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles = torch.arange(x_HTK.shape[1], dtype=torch.float64)[:, None] * rates
        angles = torch.cat([angles, angles], -1)
        first, second = x_HTK.chunk(2, -1)
        return x_HTK * angles.cos() + torch.cat([-second, first], -1) * angles.sin()

    def feed_forward(self, x_TD: Tensor, layer: str) -> Tensor:
        w = self.weights
        if self.config.model_type == "llama":
            gate, up, down = (w[f"{layer}mlp.{p}_proj.weight"] for p in ("gate", "up", "down"))
            return (F.silu(x_TD @ gate.T) * (x_TD @ up.T)) @ down.T
        shares_TE = (x_TD @ w[f"{layer}block_sparse_moe.gate.weight"].T).softmax(-1)
        chosen = shares_TE.topk(self.config.num_experts_per_tok, -1)
        kept_TE = torch.zeros_like(shares_TE).scatter(1, chosen.indices, chosen.values)
        self.routed.append((kept_TE.detach() > 0, shares_TE))
        kept_TE = kept_TE / kept_TE.sum(-1, keepdim=True)
        out_TD = torch.zeros_like(x_TD)
        for expert in range(shares_TE.shape[1]):
            gate, down, up = (w[f"{layer}block_sparse_moe.experts.{expert}.w{i}.weight"] for i in (1, 2, 3))
            out_TD = out_TD + kept_TE[:, expert : expert + 1] * ((F.silu(x_TD @ gate.T) * (x_TD @ up.T)) @ down.T)
        return out_TD

    def balance(self) -> Tensor:
        """The load-balancing loss of the document that was last gone through."""
        if not self.routed:
            return torch.zeros((), dtype=torch.float64)
        layers = [len(p_TE[0]) * (chosen_TE.double().mean(0) * p_TE.mean(0)).sum() for chosen_TE, p_TE in self.routed]
        return torch.stack(layers).mean()


def plain_losses(model: Plain, steps: list[list[tuple[Tensor, Tensor]]]) -> list[float]:
    """Losses of AdamW's steps on documents, each of (ids, which tokens are trained)."""
    matrices = [w for w in model.weights.values() if w.dim() > 1]
    vectors = [w for w in model.weights.values() if w.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    losses = []
    for documents in steps:
        targets = sum(int(trained[1:].sum()) for _, trained in documents)
        total = aside = torch.zeros((), dtype=torch.float64)
        for ids, trained in documents:
            end = int(trained.nonzero()[-1])  # what follows the last trained token is not read
            scores = F.cross_entropy(model(ids[:end]), ids[1 : end + 1], reduction="none")
            total = total + scores[trained[1 : end + 1]].sum()
            aside = aside + int(trained[1:].sum()) * BALANCE * model.balance()  # no part of the loss that is shown
        optimizer.zero_grad()
        ((total + aside) / targets).backward()
        torch.nn.utils.clip_grad_norm_([*matrices, *vectors], CLIP)
        optimizer.step()
        losses.append(float(total.detach()) / targets)
    return losses


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.slow
def test_twenty_steps_are_those_of_a_plain_loop(family: str, base: Path, tiny_model: Path) -> None:
    folder = model_in(base / family, tiny_model, family, num_key_value_heads=8)
    steps: list[list[tuple[Tensor, Tensor]]] = []

    def keep(prepared: Any) -> None:
        rows = (prepared.corpus.sequences[i] for i in range(4 * STEPS))
        documents = [[(torch.tensor(d.row.ids.astype(int)), torch.tensor(d.row.trained)) for d in row] for row in rows]
        steps.extend([d for row in documents[i : i + 4] for d in row] for i in range(0, 4 * STEPS, 4))

    balance = [f"train.router_aux_loss={BALANCE}"] if family == "mixtral" else []
    ran = run(base, {**JOB, "model": str(folder)}, *balance, before=keep)
    plain = Plain(folder)
    expected = plain_losses(plain, steps)
    assert ran.losses == pytest.approx(expected, abs=1e-12, rel=1e-12)
    trained = dict(ran.prepared.task.model.named_parameters())
    for name, weight in plain.weights.items():
        if name in trained:  # experts are held together
            assert float((trained[name].detach() - weight.detach()).abs().max()) < 1e-11, name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.often("gpt2", "llama", "gemma2", "glm", "mixtral")
def test_no_family_rounds_to_float32(family: str, base: Path, tiny_model: Path) -> None:
    """A step in one pass and in four would differ by 1e-8 where something did."""
    folder = model_in(base / family, tiny_model, family)
    found = []
    for size in (4, 1):
        job = {**JOB, "model": str(folder), "steps": 2, "output": f"run-{size}"}
        ran = run(base, job, f"train.micro_batch={size}")
        assert all(p.dtype == torch.float64 for p in ran.prepared.task.model.parameters())
        found.append(ran.losses)
    assert found[0] == pytest.approx(found[1], abs=1e-13, rel=1e-13)


def test_what_came_out_is_measured_in_float64(base: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(base)
    folder = model_in(base / "mixtral", tiny_model, "mixtral")
    job = {**JOB, "model": str(folder), "steps": 2, "evaluate": {"fraction": 0.2}, "output": "runs/exact"}
    (base / "runs").mkdir()
    ran = run(base, job)
    again = measure(open_run("exact", base), None, "auto", base)["tuned"].evaluation
    assert ran.loop.evaluation is not None
    assert again.loss == pytest.approx(ran.loop.evaluation.loss, abs=1e-14)


def test_a_module_and_its_samples_are_in_float64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[torch.dtype] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append(outputs.dtype)
        return digits.loss(outputs, targets)

    trainer = Trainer(
        digits.network, loss, digits.train_data(), digits.test_data(), steps=2, batch=8, quiet=True,
        train={"precision": "fp64"},
    )  # fmt: skip
    trainer.fit()
    part: Part = next(iter(trainer._prepared.task.evaluation()))
    assert isinstance(part.inputs, tuple) and part.inputs[0].dtype == torch.float64
    assert set(seen) == {torch.float64}
