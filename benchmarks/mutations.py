"""What `make mutants` does to a copy of the source: one line at a time, and which small job should tell.

Every ``old`` occurs exactly once in its file; the runner refuses the list otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Small configurations, by the name of the folder that they are written to.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama", "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72,
        "tie_word_embeddings": True,
    },
    "untied": {
        "model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64,
        "tie_word_embeddings": False,
    },
    "one-key": {
        "model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 64,
        "tie_word_embeddings": False,
    },
    "moe": {
        "model_type": "qwen3_moe", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64,
        "num_experts": 5, "num_experts_per_tok": 2,
    },
    "gpt2": {"model_type": "gpt2", "n_head": 5, "n_embd": 40},
    "mistral": {
        "model_type": "mistral", "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64,
        "sliding_window": 64,
    },
    "gemma2": {
        "model_type": "gemma2", "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64, "head_dim": 8,
    },
    "bloom": {"model_type": "bloom", "n_head": 6, "hidden_size": 48},
}  # fmt: skip

# Jobs, as the rest of a job file behind its data.
JOBS: dict[str, str] = {
    "one": "task: sft\nmodel: llama\ntrain: {weight_decay: 0.1, accumulation: 3, micro_batch: 2}\nepochs: 1\n",
    "wsd": "task: sft\nmodel: untied\ntrain: {schedule: wsd, min_lr: 0.2, accumulation: 2}\nepochs: 1\n",
    "linear": "task: sft\nmodel: untied\ntrain: {schedule: linear, warmup: 3, optimizer: sgd, beta1: 0.8}\nepochs: 1\n",
    "steps": "task: sft\nmodel: untied\nsteps: 50\n",
    "packed": "task: pretrain\nmodel: untied\nepochs: 1\nparallel: {data: 2}\n",
    "ddp": "task: sft\nmodel: llama\ntrain: {accumulation: 5, micro_batch: 2}\nepochs: 1\nparallel: {data: 2}\n",
    "zero1": "task: sft\nmodel: llama\ntrain: {accumulation: 2}\nparallel: {data: 2, shard: zero1}\n",
    "zero2": "task: sft\nmodel: llama\ntrain: {accumulation: 2}\nparallel: {data: 2, shard: zero2}\n",
    "zero3": "task: sft\nmodel: llama\ntrain: {accumulation: 2}\nparallel: {data: 2, shard: zero3}\n",
    "hybrid": "task: sft\nmodel: llama\ntrain: {accumulation: 2}\n"
    "parallel: {data: 4, shard: zero2, shard_size: 2}\n",
    "offload": "task: sft\nmodel: llama\nparallel: {data: 2, shard: zero2, offload: optimizer}\n",
    "tensor": "task: sft\nmodel: llama\nparallel: {tensor: 2, sequence: false}\n",
    "sequence": "task: sft\nmodel: untied\nparallel: {tensor: 2, sequence: true}\n",
    "one-key": "task: sft\nmodel: one-key\nparallel: {tensor: 2, sequence: false}\n",
    "gpt2": "task: sft\nmodel: gpt2\nparallel: {tensor: 2, sequence: true}\n",
    "bloom": "task: sft\nmodel: bloom\nparallel: {context: 2, context_by: ulysses}\n",
    "moe": "task: sft\nmodel: moe\nparallel: {tensor: 2, sequence: false}\n",
    "1f1b": "task: sft\nmodel: llama\ntrain: {accumulation: 3}\nparallel: {pipeline: 2}\n",
    "uneven": "task: sft\nmodel: untied\ntrain: {accumulation: 3}\nparallel: {pipeline: 2, stages: [3, 2]}\n",
    "zbv": "task: sft\nmodel: untied\ntrain: {accumulation: 4}\nparallel: {pipeline: 2, schedule: zbv}\n",
    "pipelines": "task: sft\nmodel: llama\ntrain: {accumulation: 2}\nparallel: {data: 2, pipeline: 2}\n",
    "gather": "task: sft\nmodel: mistral\nparallel: {context: 2}\n",
    "ulysses": "task: sft\nmodel: llama\ntrain: {accumulation: 2}\nparallel: {context: 3, context_by: ulysses}\n",
    "window": "task: sft\nmodel: mistral\n",
    "softcap": "task: sft\nmodel: gemma2\nparallel: {tensor: 2}\n",
    "lora": "task: sft\nmodel: llama\ntune: {method: lora, rank: 4, alpha: 12, loraplus_ratio: 8, dropout: 0.1}\n"
    "parallel: {tensor: 2, sequence: false}\n",
    "rslora": "task: sft\nmodel: untied\ntune: {method: lora, rslora: true, modules_to_save: [lm_head]}\n"
    "parallel: {data: 2, shard: zero3}\n",
    "dropout": "task: sft\nmodel: gpt2\nparallel: {data: 2, tensor: 2, sequence: false}\n",
    "recompute": "task: sft\nmodel: gpt2\nparallel: {data: 2, recompute: full}\n",
    "prompt": "task: sft\nmodel: untied\ntune: {method: prompt, tokens: 5}\nparallel: {data: 2}\n",
    "prefix": "task: sft\nmodel: untied\ntune: {method: prefix, tokens: 5}\nparallel: {data: 2, shard: zero2}\n",
}


@dataclass(frozen=True)
class Mutation:
    """One line of the source, changed.

    Attributes:
        file: below ``src/stoker``.
        job: of `JOBS`, by which `stoker verify` should find it.
        why: what would be trained otherwise.
        harmless: why nobody could see it, where that is so.
    """

    name: str
    file: str
    old: str
    new: str
    job: str
    why: str
    harmless: str = ""


M = Mutation
MUTATIONS: tuple[Mutation, ...] = (
    # -- the step --------------------------------------------------------------------------------------------
    M("last-micro-batch-skipped", "train/step.py", "range(*mine, plan.micro_batch)", "range(mine[0], mine[1] - plan.micro_batch, plan.micro_batch)", "one", "the last micro-batch is never seen"),
    M("micro-batch-off-by-one", "train/step.py", "min(i + plan.micro_batch, mine[1])", "min(i + plan.micro_batch - 1, mine[1])", "one", "a row of each micro-batch is lost"),
    M("four-micro-batches", "train/step.py", "parts = [part for micro_batch in micro_batches for part in micro_batch]", "parts = [part for micro_batch in micro_batches[:4] for part in micro_batch]", "ddp", "what comes after the fourth pass is lost"),
    M("gradients-kept", "train/step.py", "self._optimizer.zero_grad(set_to_none=True)", "pass", "one", "gradients of all steps add up"),
    M("rate-never-set", "train/step.py", "set_rate(groups, lr)", "pass", "one", "no schedule"),
    M("not-clipped", "train/step.py", "norm = self._passes.clip(plan.clip)", "norm = self._passes.clip(0.0)", "one", "the gradient is not clipped"),
    M("same-dropout-every-step", "train/step.py", "key = stream_key(seed, 7, step, *([seat] if seat else []))", "key = stream_key(seed, 7, *([seat] if seat else []))", "dropout", "every step drops the same"),
    M("same-dropout-everywhere", "train/step.py", "*([seat] if seat else [])", "", "dropout", "data-parallel processes drop the same"),
    # -- passes ----------------------------------------------------------------------------------------------
    M("mean-over-process", "train/passes.py", "everybody[self._mesh.data_index] = torch.tensor([mine.targets, mine.tokens, mine.passes])", "everybody[:] = torch.tensor([mine.targets, mine.tokens, mine.passes])", "ddp", "the loss is normalised by this process' tokens times their number"),
    M("loss-not-normalised", "train/passes.py", "scaler.scale(loss / max(1, counts.targets)).backward()", "scaler.scale(loss / max(1, part.targets)).backward()", "one", "each pass is a mean by itself"),
    M("ddp-sums-every-pass", "train/passes.py", "return self._root.no_sync()", "return nullcontext()", "ddp", "gradients are summed after every pass, and again with the next"),
    M("share-of-first", "train/passes.py", "start = min(last, first + self._mesh.data_index * size)", "start = min(last, first)", "ddp", "all processes take the same samples"),
    M("share-too-long", "train/passes.py", "return start, min(last, start + size)", "return start, min(last, start + size + 1)", "ddp", "two processes take the same sample"),
    M("short-batch-read-past-its-end", "train/passes.py", "return start, min(last, start + size)", "return start, start + size", "ddp", "the last batch reaches over the end"),
    M("nothing-trains", "train/passes.py", "parts = [*parts, *[self._task.nothing()] * (counts.passes - len(parts))]", "parts = [*parts, *parts[:1] * (counts.passes - len(parts))]", "uneven", "a micro-batch is trained twice where there are fewer than the schedule takes"),
    M("alike-counted-twice", "train/passes.py", "sums = torch.cat([torch.zeros_like(alike) if self._mesh.at(\"tensor\") else alike, each])", "sums = torch.cat([alike, each])", "tensor", "the loss is counted by every tensor process"),
    M("evaluation-of-own-parts", "train/passes.py", "mine = self._laid_out(padded[self._mesh.data_index :: size])", "mine = self._laid_out(padded[:: size])", "ddp", "processes evaluate the same rows"),
    M("evaluation-drops-rest", "train/passes.py", "padded = [*parts, *[self._task.nothing()] * (-len(parts) % size)]", "padded = list(parts[: len(parts) // size * size])", "ddp", "rows that do not divide are not evaluated"),
    M("seat-without-data", "train/passes.py", "place = (mesh.at(\"pipe\") * layout.data + mesh.data_index) * layout.context + mesh.at(\"context\")", "place = mesh.at(\"pipe\") * layout.context + mesh.at(\"context\")", "dropout", "data-parallel processes drop the same"),
    M("seat-apart-in-tensor", "train/passes.py", "alike = mesh.at(\"tensor\") if layout.sequence else 0", "alike = mesh.at(\"tensor\")", "dropout", "tensor processes drop different parts of the same activations"),
    M("alone-stops-early", "train/passes.py", "        for part in parts:\n            total += _forward_backward", "        for part in parts[:4]:\n            total += _forward_backward", "one", "one process leaves passes out", "one process makes one pass a step in the twin's reference, and the plain loop finds it where a job's own accumulation is more than four"),
    # -- optimizer and schedule ------------------------------------------------------------------------------
    M("no-weight-decay", "train/optimizer.py", "decay = train.weight_decay if parameter.dim() >= 2 else 0.0", "decay = 0.0", "one", "nothing is decayed"),
    M("norms-decayed", "train/optimizer.py", "decay = train.weight_decay if parameter.dim() >= 2 else 0.0", "decay = train.weight_decay", "one", "norms and biases are decayed"),
    M("betas-swapped", "train/optimizer.py", "betas=(train.beta1, train.beta2)", "betas=(train.beta2, train.beta1)", "one", "Adam's moments are swapped"),
    M("eps-default", "train/optimizer.py", "eps=train.eps, fused=fused", "fused=fused", "one", "the job's eps is not used"),
    M("no-momentum", "train/optimizer.py", "momentum=train.beta1", "momentum=0.0", "linear", "SGD without momentum"),
    M("ratio-ignored", "train/optimizer.py", "group[\"lr\"] = lr * group[\"lr_ratio\"]", "group[\"lr\"] = lr", "lora", "LoRA+ does nothing"),
    M("ratio-on-both", "train/optimizer.py", "ratio = loraplus_ratio if any(second in name for second in SECOND) else 1.0", "ratio = loraplus_ratio", "lora", "both LoRA matrices learn faster"),
    M("warmup-off-by-one", "train/schedule.py", "return self.peak * step / self.warmup", "return self.peak * (step - 1) / self.warmup", "one", "the warm-up begins at 0"),
    M("warmup-too-long", "train/schedule.py", "if step <= self.warmup:", "if step < self.warmup:", "one", "the warm-up ends a step early", "at the step where they differ both sides of the test give the peak"),
    M("schedule-off-by-one", "train/schedule.py", "progress = (step - self.warmup - 1) / max(1, steps - self.warmup)", "progress = (step - self.warmup) / max(1, steps - self.warmup)", "one", "the schedule is a step ahead"),
    M("warmup-not-left-out", "train/schedule.py", "progress = (step - self.warmup - 1) / max(1, steps - self.warmup)", "progress = (step - self.warmup - 1) / max(1, steps)", "one", "the schedule never ends"),
    M("no-floor", "train/schedule.py", "return self.peak * (self.floor + (1.0 - self.floor) * SHAPES[self.shape](progress))", "return self.peak * SHAPES[self.shape](progress)", "wsd", "min_lr does nothing"),
    M("cosine-half", "train/schedule.py", "0.5 * (1.0 + math.cos(math.pi * progress))", "0.5 * (1.0 + math.cos(0.5 * math.pi * progress))", "one", "the cosine ends half-way"),
    M("wsd-decay", "train/schedule.py", "WSD_DECAY = 0.2", "WSD_DECAY = 0.5", "wsd", "the stable phase ends early"),
    M("linear-half", "train/schedule.py", "\"linear\": lambda progress: 1.0 - progress", "\"linear\": lambda progress: 1.0 - 0.5 * progress", "linear", "the line ends half-way"),
    M("warmup-floored", "train/schedule.py", "return warmup if isinstance(warmup, int) else round(warmup * steps)", "return warmup if isinstance(warmup, int) else 0", "one", "a warm-up given as a fraction is none"),
    M("min-lr-not-passed", "train/plan.py", "job.train.schedule, job.train.min_lr, first", "job.train.schedule, 0.0, first", "wsd", "min_lr does nothing"),
    M("not-finite-skips", "train/finite.py", "bad = (odd > 0) | total.isfinite().logical_not()", "bad = (odd >= 0) | total.isfinite().logical_not()", "one", "no step is taken"),
    # -- how long --------------------------------------------------------------------------------------------
    M("short-batch-dropped", "train/passed.py", "steps += -(-(end - start) // batch)", "steps += (end - start) // batch", "one", "the last short batch is never trained"),
    M("one-step-less", "train/passed.py", "return beyond + steps * batch", "return beyond + (steps - 1) * batch", "steps", "the last step has no samples"),
    M("span-past-the-end", "train/loop.py", "span = first, min(last, self.plan.samples)", "span = first, last", "one", "the last batch reaches into the next epoch"),
    M("samples-not-counted", "train/loop.py", "done.step, done.samples = taken.step, taken.span[1]", "done.step, done.samples = taken.step, taken.span[0] + self.plan.micro_batch", "one", "samples are taken twice"),
    M("evaluated-late", "train/loop.py", "if last or step % self.plan.evaluate_every == 0:", "if last:", "one", "the model is evaluated at the end only"),
    M("trains-in-evaluation", "train/evaluate.py", "    task.model.eval()\n", "    pass\n", "dropout", "dropout is at work in evaluations"),
    M("evaluates-in-training", "train/evaluate.py", "task.model.train(training)", "pass", "dropout", "no dropout after the first evaluation"),
    M("mean-of-means", "train/evaluate.py", "return Evaluation(totals.loss / totals.targets, accuracy, totals.targets)", "return Evaluation(totals.loss / len(held_out), accuracy, totals.targets)", "one", "the evaluation is not a mean over tokens"),
    # -- data order ------------------------------------------------------------------------------------------
    M("same-order-every-epoch", "data/mix.py", "rows[here] = permute(indices[here], size, stream_key(key, int(epoch)))", "rows[here] = permute(indices[here], size, stream_key(key, 0))", "one", "every epoch of a source has the same order"),
    M("seed-not-used", "data/mix.py", "key = stream_key(self.seed, 1, number)", "key = stream_key(0, 1, number + 1)", "one", "the order does not depend on the seed"),
    M("not-shuffled", "data/mix.py", "shuffled = permute(positions, self.pattern, key)", "shuffled = positions", "one", "slots are not shuffled"),
    M("rounds", "data/order.py", "_ROUNDS = 6", "_ROUNDS = 5", "one", "another order than that of earlier runs"),
    M("row-repeated", "data/sequences.py", "return self._documents((sources, rows), [index % BLOCK])", "return self._documents((sources, rows), [index % BLOCK // 2 * 2])", "one", "every second row is taken twice"),
    M("block-shifted", "data/sequences.py", "return self.mixture.draws(np.arange(number * BLOCK, (number + 1) * BLOCK))", "return self.mixture.draws(np.arange(number * BLOCK + 1, (number + 1) * BLOCK + 1))", "one", "the first row is left out"),
    M("packed-window-unordered", "data/pack.py", "return [sorted(bins[int(i)]) for i in order]", "return [bins[int(i)] for i in range(len(bins))]", "packed", "packed sequences come sorted by how full they are"),
    M("packed-epoch-ignored", "data/sequences.py", "sources, rows = self.mixture.draws(np.arange(self._slots[number], self._slots[number + 1]))", "sources, rows = self.mixture.draws(np.arange(self._slots[number + 1] - self._slots[number]))", "packed", "every window holds the same rows"),
    # -- rows and masks --------------------------------------------------------------------------------------
    M("mask-shifted", "models/rows.py", "where = np.flatnonzero(trained[1:])  # positions that predict a trained token", "where = np.flatnonzero(trained[:-1])", "one", "targets are one token late"),
    M("targets-shifted", "models/rows.py", "targets.append(ids[where + 1])", "targets.append(ids[where])", "one", "a token predicts itself"),
    M("positions-go-on", "models/rows.py", "positions.append(np.arange(shared, shared + own))", "positions.append(np.arange(at, at + own))", "window", "positions do not restart in a document", "rotary attention sees differences of positions only, which stay the same within a document; a model with learned positions is packed only if the probe agrees"),
    M("prefix-positions", "models/rows.py", "positions.append(np.arange(shared))", "positions.append(np.arange(shared) + 1)", "one", "shared beginnings are a position off"),
    M("prompt-trained", "data/tokenise.py", "clipped = [(max(a, begin) - first, min(b, last) - first) for a, b in trained]", "clipped = [(0, min(b, last) - first) for a, b in trained]", "one", "prompts are trained"),
    M("window-overlap", "data/tokenise.py", "for i in range(0, length - 1, seq_len - 1)]", "for i in range(0, length - 1, seq_len)]", "packed", "the first token of each further window is never predicted"),
    M("virtual-tokens-trained", "models/layout.py", "trained = np.concatenate((np.zeros(len(self.virtual) + 1, bool), trained[1:]))", "trained = np.concatenate((np.zeros(len(self.virtual), bool), trained))", "prompt", "", "the first token of a row is never trained, so there is nothing to be shifted"),
    # -- attention -------------------------------------------------------------------------------------------
    M("not-causal", "models/packed.py", "is_causal=mask is None,", "is_causal=False,", "zero2", "tokens see what follows them"),
    M("sees-next-token", "models/packed.py", "else distance >= 0\n", "else distance >= -1\n", "gather", "a token sees the next one"),
    M("window-off-by-one", "models/packed.py", "(distance >= 0) & (distance < window)", "(distance >= 0) & (distance <= window)", "gather", "a sliding window sees a token more"),
    M("leaks", "models/packed.py", "k, v = (x[stretch.segment][:, :, :end] for x in (keys, values))", "k, v = (x[0][:, :, :end] for x in (keys, values))", "ddp", "documents attend to the first one"),
    M("prefix-not-seen", "models/packed.py", "        if s.prefix_length:\n", "        if False:\n", "ddp", "the shared beginning is not attended to"),
    M("scaling-ignored", "models/packed.py", "scale=scaling,", "scale=None,", "softcap", "attention is scaled by the head size only", "the model's scaling is that of its head size in all families whose attention takes this path"),
    M("cap-ignored", "models/packed.py", "scores = softcap * torch.tanh(scores / softcap)", "pass", "softcap", "scores are not capped"),
    # -- the head --------------------------------------------------------------------------------------------
    M("cap-slope", "models/head.py", "slope_CV = 1 - (logits_CV / softcap) ** 2 if softcap", "slope_CV = 1 - (logits_CV / softcap) if softcap", "softcap", "the gradient of capped logits is wrong"),
    M("softmax-across", "models/head.py", "total_C, picked_C = _summed(across, total_C, picked_C)", "_, picked_C = _summed(across, total_C, picked_C)", "tensor", "the softmax is over this process' words only"),
    M("maximum-of-own", "models/head.py", "                across.maximum(top_C)\n", "                pass\n", "tensor", "words are compared with another maximum on each process"),
    M("vocabulary-start", "models/head.py", "return torch.where(own_C, t_C - across.start, 0), own_C", "return torch.where(own_C, t_C, 0), own_C", "tensor", "targets are looked up in the wrong row"),
    M("own-words", "models/head.py", "own_C = (t_C >= across.start) & (t_C < across.start + words)", "own_C = (t_C >= across.start) & (t_C <= across.start + words)", "tensor", "a target of the next process is taken"),
    M("hit-everywhere", "models/head.py", "hit_C = torch.full_like(total_C, -1.0) if own_C is None else -own_C.to(total_C.dtype)", "hit_C = torch.full_like(total_C, -1.0)", "tensor", "every process subtracts the target"),
    M("head-gradient", "models/head.py", "(weight * grad_loss).to(ctx.dtypes[0]) if weight is not None else None", "weight.to(ctx.dtypes[0]) if weight is not None else None", "one", "the head's gradient is not normalised"),
    # -- sharding and replication ----------------------------------------------------------------------------
    M("ddp-mean", "parallel/replicate.py", "work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)", "work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size(group)), group=group, async_op=True)", "ddp", "gradients are averaged"),
    M("ddp-not-summed", "parallel/replicate.py", "    replicated.register_comm_hook(group, _sum)\n", "    replicated.register_comm_hook(group, lambda _g, b: torch.futures.Future().set_result(b.buffer()) or _done(b))\n", "ddp", "gradients are not summed"),
    M("fsdp-mean", "parallel/shard.py", "module.set_gradient_divide_factor(1.0)", "pass", "zero3", "gradients are averaged"),
    M("zero1-never-complete", "parallel/shard.py", "root.set_requires_gradient_sync(last or layout.shard != \"zero1\")", "root.set_requires_gradient_sync(layout.shard != \"zero1\")", "zero1", "gradients are never reduced"),
    M("hybrid-not-reduced", "parallel/shard.py", "root.set_requires_all_reduce(last)", "root.set_requires_all_reduce(False)", "hybrid", "copies are never brought together"),
    M("hybrid-reduced-always", "parallel/shard.py", "root.set_requires_all_reduce(last)", "root.set_requires_all_reduce(True)", "hybrid", "what has been reduced is reduced again", "fully_shard adds up what it has reduced: the sums are the same, for more traffic"),
    M("stale-weights", "parallel/shard.py", "root.set_reshard_after_backward(last)", "root.set_reshard_after_backward(False)", "zero2", "gathered weights are kept over the step"),
    M("not-last", "parallel/shard.py", "root.set_is_last_backward(last)", "root.set_is_last_backward(False)", "zero2", "the end of the backward pass is not waited for"),
    M("offload-stale", "parallel/offload.py", "                copy.copy_(parameter)\n", "                pass\n", "offload", "the host steps from weights that it never read"),
    M("offload-rate", "parallel/offload.py", "inner[\"lr\"], inner[\"weight_decay\"] = outer[\"lr\"], outer[\"weight_decay\"]", "pass", "offload", "the host's optimizer has no schedule"),
    M("offload-not-copied-back", "parallel/offload.py", "                parameter.copy_(copy)\n", "                pass\n", "offload", "the device never gets the new weights"),
    # -- norm, clipping, ties --------------------------------------------------------------------------------
    M("clamp", "parallel/gradients.py", "factor = (limit / (norm + 1e-6)).clamp(max=1.0)", "factor = limit / (norm + 1e-6)", "zero2", "gradients below the limit are scaled up"),
    M("norm-without-shards", "parallel/gradients.py", "            sum_over(_shards(self._mesh), split, whole)\n", "            pass\n", "zero2", "the norm is that of a shard"),
    M("norm-split-once", "parallel/gradients.py", "sum_over(self._mesh.groups[\"tensor\"], split)", "pass", "tensor", "the norm is that of a process' part"),
    M("norm-whole-twice", "parallel/gradients.py", "sum_over(self._mesh.groups[\"tensor\"], split)", "sum_over(self._mesh.groups[\"tensor\"], split, whole)", "tensor", "what all hold is counted by each"),
    M("norm-of-a-stage", "parallel/gradients.py", "sum_over(self._mesh.groups[\"pipe\"], total)", "pass", "1f1b", "the norm is that of a stage"),
    M("norm-with-copy", "parallel/gradients.py", "if t.parameter.grad is not None and not t.copy:", "if t.parameter.grad is not None:", "1f1b", "a tied embedding is counted twice"),
    M("partial-not-summed", "parallel/gradients.py", "self._sum([t.parameter for t in self._trained if t.partial], \"tensor\")", "pass", "sequence", "norms learn from their process' tokens only"),
    M("partial-over-batch", "parallel/gradients.py", "self._sum([t.parameter for t in self._trained if t.partial], \"tensor\")", "self._sum([t.parameter for t in self._trained if t.partial], \"batch\")", "sequence", "partial gradients are summed over the wrong processes"),
    M("ties-not-joined", "parallel/gradients.py", "        self._join_ties()\n\n    def norm", "\n    def norm", "1f1b", "embedding and head come apart"),
    M("ties-from-one-end", "parallel/gradients.py", "dist.all_reduce(total, group=self._mesh.groups[\"ends\"])", "dist.broadcast(total, group=self._mesh.groups[\"ends\"], group_src=0)", "1f1b", "a tied head learns as an embedding only"),
    M("pipelines-not-summed", "parallel/gradients.py", "        if self._reduce_batch:\n", "        if False:\n", "pipelines", "data-parallel pipelines come apart"),
    # -- tensors ---------------------------------------------------------------------------------------------
    M("key-heads-even", "parallel/heads.py", "keys = (key_heads * index // processes, key_heads * (index + 1) // processes)", "keys = (key_heads // processes * index, key_heads // processes * (index + 1))", "tensor", "a key-value head that does not divide is lost"),
    M("query-heads-even", "parallel/heads.py", "return Heads(query_heads, key_heads, (keys[0] * group, keys[1] * group), keys)", "return Heads(query_heads, key_heads, (query_heads * index // processes, query_heads * (index + 1) // processes), keys)", "tensor", "queries go with the wrong keys"),
    M("wrong-key-head", "parallel/heads.py", "key = index // (processes // key_heads)", "key = 0", "one-key", "every process computes the first key-value head", "with one key-value head it is the first; with several, tensor processes have to outnumber them twice over"),
    M("repeated-not-partial", "parallel/tensor.py", "            self.placed.partial.update(f\"{name}{inner}.{key}\" for key in keys)\n", "            pass\n", "one-key", "repeated key-value heads come apart"),
    M("row-not-summed", "parallel/tensor.py", "total = scatter_sum(out, out.dim() - 2, group) if sequence else sum_from(out, group)", "total = scatter_sum(out, out.dim() - 2, group) if sequence else out", "tensor", "a row layer gives a part of its sum"),
    M("bias-on-each", "parallel/tensor.py", "linear.forward = partial(_without_bias, linear)", "pass", "gpt2", "a bias is added by every process"),
    M("no-copy-backward", "parallel/tensor.py", "x = gather_parts(x, x.dim() - 2, group) if sequence else copy_to(x, group)", "x = gather_parts(x, x.dim() - 2, group) if sequence else x", "tensor", "the gradient of a region's input is a part of it"),
    M("positions-not-cut", "parallel/tensor.py", "return out if out.dim() == 0 else out.chunk(size, dim=-2)[mesh.at(\"tensor\")]", "return out if out.dim() == 0 else out.chunk(size, dim=-2)[0]", "gpt2", "every process has the first positions"),
    M("experts-offset", "parallel/tensor.py", "return (hidden, (index - start).masked_fill(~own, stop - start), *rest)", "return (hidden, index.masked_fill(~own, stop - start), *rest)", "moe", "tokens go to the wrong experts"),
    M("expert-of-next", "parallel/tensor.py", "own = (index >= start) & (index < stop)", "own = (index >= start) & (index <= stop)", "moe", "an expert of the next process is asked"),
    M("router-not-summed", "parallel/tensor.py", "self.placed.partial.add(f\"{path}.{name}.{key}\")", "pass", "moe", "routers learn from their process' experts only"),
    M("lora-a-not-partial", "parallel/tensor.py", "            if side == \"A\":\n                self.placed.partial.add(f\"{name}{inner}.weight\")\n", "            if side == \"A\":\n", "lora", "the first LoRA matrix learns from a part of the outputs"),
    M("lora-b-not-partial", "parallel/tensor.py", "            if side == \"B\":\n                self.placed.partial.add(f\"{name}{inner}.weight\")\n", "            if side == \"B\":\n", "lora", "the second LoRA matrix learns from a part of the inputs"),
    M("embedding-not-summed", "parallel/vocabulary.py", "if mesh.layout.sequence else sum_from(vectors, group)", "if mesh.layout.sequence else vectors", "tensor", "words of other processes are zeros"),
    M("embedding-own-words", "parallel/vocabulary.py", "    vectors = vectors * own[..., None]\n", "", "tensor", "words of other processes are looked up in the wrong row"),
    M("tie-lost", "parallel/vocabulary.py", "            head.weight = embedding.weight  # type: ignore[union-attr]\n", "            pass\n", "tensor", "a split tied head is not tied"),
    M("head-copied-not", "parallel/stage.py", "if mesh.layout.sequence else copy_to(hidden_BTD, group)", "if mesh.layout.sequence else hidden_BTD", "tensor", "the gradient into the last block covers a part of the vocabulary"),
    M("apart-not", "parallel/randomness.py", "seed = int(torch.randint(2**62, ())) + self._index", "seed = int(torch.randint(2**62, ()))", "dropout", "different heads drop the same"),
    M("apart-for-ever", "parallel/randomness.py", "            torch.set_rng_state(cpu)\n", "            pass\n", "dropout", "tensor processes drop other parts of common activations"),
    # -- collectives -----------------------------------------------------------------------------------------
    M("copy-backward", "parallel/collectives.py", "        return _all_reduce(grad, ctx.group), None\n", "        return grad, None\n", "tensor", "a region's gradients are not summed"),
    M("gather-backward", "parallel/collectives.py", "return reduce_scatter(grad, ctx.dim, ctx.group), None, None", "return grad.chunk(dist.get_world_size(ctx.group), ctx.dim)[dist.get_rank(ctx.group)], None, None", "sequence", "gathered tokens' gradients are not summed"),
    M("sum-backward", "parallel/collectives.py", "        return grad, None\n", "        return _all_reduce(grad, ctx.group), None\n", "tensor", "gradients are summed twice"),
    M("maximum-reduced-as-sum", "parallel/vocabulary.py", "dist.all_reduce(x_C, op=dist.ReduceOp.MAX, group=self.group)", "dist.all_reduce(x_C, group=self.group)", "tensor", "accuracy and the largest logit are wrong"),
    # -- context ---------------------------------------------------------------------------------------------
    M("context-order", "parallel/context.py", "torch.cat((*parts[0::2], *reversed(parts[1::2])), dim=2)", "torch.cat((*parts[0::2], *parts[1::2]), dim=2)", "gather", "gathered keys are in the wrong order", "two processes have one back part each, in one order; see context-halves"),
    M("context-halves", "parallel/context.py", "torch.cat((*parts[0::2], *reversed(parts[1::2])), dim=2)", "torch.cat(parts, dim=2)", "gather", "gathered keys are in the wrong order"),
    M("context-back-part", "parallel/context.py", "((2 * size - 1 - index) * step, (2 * size - index) * step))", "((size + index) * step, (size + index + 1) * step))", "gather", "the row's back parts belong to others"),
    M("context-heads", "parallel/context.py", "return slice(dist.get_rank(self.group) * own, (dist.get_rank(self.group) + 1) * own)", "return slice(0, own)", "bloom", "every process attends with the first heads' slopes"),
    M("context-predicts-twice", "parallel/context.py", "targets=inputs.targets[predict >= 0],", "targets=inputs.targets[: int((predict >= 0).sum())],", "gather", "predictions are compared with the wrong targets"),
    M("context-positions", "parallel/context.py", "positions=inputs.positions[:, own],", "positions=inputs.positions[:, : len(own)],", "gather", "positions are those of the row's beginning"),
    M("context-counted", "train/passes.py", "        if self._mesh.at(\"context\") == 0:\n", "        if True:\n", "context-data", "targets are counted by every context process"),
    # -- pipeline --------------------------------------------------------------------------------------------
    M("stages-shifted", "parallel/cut.py", "ends = [sum(sizes[: i + 1]) for i in range(count)]", "ends = [sum(sizes[: i + 1]) for i in range(count - 1)] + [sum(sizes) - 1]", "uneven", "the last stage has the wrong blocks"),
    M("blocks-uneven", "parallel/cut.py", "sizes = layout.stages or tuple(blocks // count + (i < blocks % count) for i in range(count))", "sizes = tuple(blocks // count + (i < blocks % count) for i in range(count))", "uneven", "stages are not those of the job", "which blocks a stage has changes nothing that is computed"),
    M("v-stages", "parallel/cut.py", "return [pipe, layout.stage_count - 1 - pipe]", "return [pipe, pipe + layout.pipeline]", "zbv", "the stages of a V lie on the wrong processes"),
    M("scale-lost", "parallel/stage.py", "return torch.stack((loss * self.scale,))", "return torch.stack((loss,))", "1f1b", "the loss is not normalised"),
    M("weights-once", "models/head.py", "(bias * grad_loss).to(ctx.dtypes[1]) if bias is not None else None,", "None,", "gpt-neox-head", "a head's bias is not trained"),
    M("rows-of-first", "parallel/stage.py", "inputs = self.rows[index]", "inputs = self.rows[0]", "1f1b", "every micro-batch is the first one"),
    M("norm-on-every-stage", "parallel/cut.py", "                _replace(model, path, _Same())\n", "                pass\n", "1f1b", "every stage norms what it hands on"),
    M("pipeline-rows-cut", "train/passes.py", "lengths = [max(lengths)] * len(rows)", "lengths = [min(lengths)] * len(rows)", "1f1b", "rows are cut"),
    # -- recompute -------------------------------------------------------------------------------------------
    M("recompute-draws-anew", "parallel/recompute.py", "use_reentrant=False, context_fn=_as_laid_out", "use_reentrant=False, preserve_rng_state=False, context_fn=_as_laid_out", "recompute", "recomputed blocks drop something else"),
    M("recompute-other-row", "parallel/recompute.py", "return nullcontext(), packed.same_again()", "return nullcontext(), nullcontext()", "recompute-pipeline", "recomputed blocks see another row's documents"),
    # -- adapters --------------------------------------------------------------------------------------------
    M("lora-scaling", "models/lora.py", "narrow_NR = torch.mm(x_NI, a_RI.T).mul_(scaling)", "narrow_NR = torch.mm(x_NI, a_RI.T)", "rslora", "LoRA is not scaled"),
    M("lora-backward", "models/lora.py", "back_NR = torch.mm(grad_NO, b_OR).mul_(scaling)", "back_NR = torch.mm(grad_NO, b_OR)", "rslora", "the first LoRA matrix' gradient is not scaled"),
    M("lora-alpha", "models/adapters.py", "lora_alpha=tune.alpha,  # type: ignore[arg-type]  # peft takes fractions as well", "lora_alpha=tune.rank,", "lora", "alpha does nothing"),
    M("lora-dropout-ignored", "models/adapters.py", "lora_dropout=tune.dropout,", "lora_dropout=0.0,", "lora", "adapters are trained without dropout"),
    M("rslora-ignored", "models/adapters.py", "use_rslora=tune.rslora,", "use_rslora=False,", "rslora", "rslora does nothing"),
    M("lora-begins-anywhere", "models/initial.py", "elif \".lora_embedding_B.\" in name:", "else:", "lora", "adapters do not begin at zero"),
    M("prompt-order", "models/virtual.py", "virtual_KD[(ids_BT - first).clamp(min=0)]", "virtual_KD[(ids_BT - first).clamp(min=0) * 0]", "prompt", "one virtual token stands for all", "no plain loop runs virtual tokens, and every layout does the same: tests of `models/virtual.py` compare with peft"),
    # -- checkpoints -----------------------------------------------------------------------------------------
    M("moments-not-restored", "train/training_state.py", "return {**held_weights(self._model, *self._names), **moments}", "return held_weights(self._model, *self._names)", "zero2", "the optimizer's moments are not restored"),
    M("moments-not-saved", "train/training_state.py", "{**held_weights(self._model, *self._names), **held_moments(self._model, self._optimizer, *self._names)},", "held_weights(self._model, *self._names),", "zero2", "the optimizer's moments are not saved"),
    M("samples-not-restored", "train/training_state.py", "return Progress(**numbers[\"progress\"])", "return Progress(**{**numbers[\"progress\"], \"samples\": 0})", "zero2", "a resumed run takes its samples again"),
    M("one-sample-on", "train/training_state.py", "return Progress(**numbers[\"progress\"])", "return Progress(**{**numbers[\"progress\"], \"samples\": numbers[\"progress\"][\"samples\"] + 1})", "zero2", "a resumed run skips a sample"),
    M("step-not-restored", "train/training_state.py", "return Progress(**numbers[\"progress\"])", "return Progress(**{**numbers[\"progress\"], \"step\": numbers[\"progress\"][\"step\"] - 1})", "zero2", "a resumed run's schedule is a step behind"),
    M("oldest-restored", "checkpoint/saver.py", "sorted([*copies, *steps], key=_newness, reverse=True)", "sorted([*copies, *steps], key=_newness)", "zero2", "a run goes on from its oldest state"),
    M("offset-of-shard", "checkpoint/chunks.py", "offsets[placement.dim] += chunk(tensor.shape[placement.dim], mesh.size(axis), at[axis])[0]", "offsets[placement.dim] += 0", "zero3", "shards are written over each other"),
    M("offset-of-piece", "checkpoint/chunks.py", "        offsets[piece.dim] = piece.start\n", "        pass\n", "tensor", "parts of split tensors are written over each other"),
    M("memory-box", "checkpoint/memory.py", "target.copy_(tensor[_within(common, item.offsets)])", "target.copy_(tensor[_within(common, chunk.offsets)])", "zero3-memory", "copies in memory are put in the wrong place", "under the same layout a box's own place and that of its copy are the same"),
    M("memory-stale", "checkpoint/slots.py", "            box.copy_(tensor, non_blocking=True)\n", "            box.copy_(tensor, non_blocking=True) if self._step is None else None\n", "zero2", "copies in memory are never renewed"),
    M("slot-newest-overwritten", "checkpoint/staging.py", "return min(slots, key=lambda slot: slot.step, default=None)", "return max(slots, key=lambda slot: slot.step, default=None)", "zero2", "the newest copy is overwritten", "a copy becomes visible when it is whole, so the newest one is lost only if the process dies while it is copied"),
    M("rows-read", "parallel/materialise.py", "rows[placement.dim] = slice(held.start + start, held.start + stop)", "rows[placement.dim] = slice(start, stop)", "zero3-tensor", "a shard of a split tensor is read from the wrong rows"),
    M("rate-of-resumed", "train/loop.py", "lr = self.schedule.lr(step)", "lr = self.schedule.lr(step - self.resumed_from_step)", "zero2", "placeholder"),
)
