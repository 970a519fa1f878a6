"""The routers' auxiliary loss of a document, for the plain loop: from the equations and transformers' router logits.

Like `plain_loop`, it imports nothing of Stoker.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def balance(model: Any, row: tuple[Tensor, Tensor], weight: float | str) -> Tensor | float:
    """Returns E * sum of f P (Fedus et al., 2022, equations 4 to 6), averaged over the layers, times the trained
    tokens.

    Args:
        row: token ids and the mask of trained tokens. Tokens after the last trained one are not computed.
        weight: factor of the loss; ``auto`` is the model's own where its routers are trained.
    """
    ids, mask = row
    if weight == "auto":
        routers = [p for name, p in model.named_parameters() if name.endswith(("mlp.gate.weight", "router.weight"))]
        weight = getattr(model.config, "router_aux_loss_coef", 0.0) if any(p.requires_grad for p in routers) else 0.0
    gemma4 = model.config.model_type == "gemma4_text"  # its routers return probabilities
    chosen_key = "top_k_experts" if gemma4 else "num_experts_per_tok"
    if not weight or not mask[1:].any() or not getattr(model.config, chosen_key, None):
        return 0.0
    inputs = ids[: int(mask.nonzero()[-1])]
    layers = []
    for logits in model(input_ids=inputs[None], output_router_logits=True).router_logits:
        p = logits.flatten(0, -2) if gemma4 else logits.flatten(0, -2).softmax(-1)
        chosen = F.one_hot(p.topk(getattr(model.config, chosen_key)).indices, p.shape[1]).sum(1).to(p.dtype).mean(0)
        layers.append(p.shape[1] * (chosen * p.mean(0)).sum())
    return torch.stack(layers).mean() * float(weight) * int(mask[1:].sum())
