"""A small causal language model that comes with its own code: layers named as ChatGLM's, no positions, no cache."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from .configuration_chatglm import ChatGLMConfig


class SelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.num_attention_heads
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden, mask):
        batch, length, width = hidden.shape
        parts = self.query_key_value(hidden).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, attn_mask=mask)
        return self.dense(mixed.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.hidden_size, 2 * config.ffn_hidden_size, bias=False)
        self.dense_4h_to_h = nn.Linear(config.ffn_hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden):
        gate, up = self.dense_h_to_4h(hidden).chunk(2, dim=-1)
        return self.dense_4h_to_h(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size)
        self.self_attention = SelfAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size)
        self.mlp = MLP(config)

    def forward(self, hidden, mask):
        hidden = hidden + self.self_attention(self.input_layernorm(hidden), mask)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class ChatGLMPreTrainedModel(PreTrainedModel):
    config_class = ChatGLMConfig
    base_model_prefix = "transformer"
    _no_split_modules = ["Block"]  # noqa: RUF012


class ChatGLMModel(ChatGLMPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embedding = nn.Embedding(config.padded_vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_layernorm = nn.RMSNorm(config.hidden_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids=None, attention_mask=None, inputs_embeds=None, **_):
        hidden = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        length = hidden.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=hidden.device).tril()[None, None]
        if attention_mask is not None:
            mask = mask & (attention_mask[:, None, None, :] > 0) | torch.eye(length, dtype=torch.bool)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return BaseModelOutput(last_hidden_state=self.final_layernorm(hidden))


class ChatGLMForConditionalGeneration(ChatGLMPreTrainedModel, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.transformer = ChatGLMModel(config)
        self.output_layer = nn.Linear(config.hidden_size, config.padded_vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.output_layer

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **_):
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def forward(self, input_ids=None, attention_mask=None, inputs_embeds=None, labels=None, **_):
        hidden = self.transformer(input_ids, attention_mask, inputs_embeds).last_hidden_state
        logits = self.output_layer(hidden)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)
