"""The configuration that comes with a model of which transformers knows nothing, under ChatGLM's names."""

from transformers import PreTrainedConfig


class ChatGLMConfig(PreTrainedConfig):
    model_type = "own_glm"
    attribute_map = {"num_hidden_layers": "num_layers", "vocab_size": "padded_vocab_size"}  # noqa: RUF012

    def __init__(
        self,
        num_layers: int = 2,
        padded_vocab_size: int = 400,
        hidden_size: int = 32,
        ffn_hidden_size: int = 48,
        num_attention_heads: int = 4,
        **more: object,
    ) -> None:
        self.num_layers = num_layers
        self.padded_vocab_size = padded_vocab_size
        self.hidden_size = hidden_size
        self.ffn_hidden_size = ffn_hidden_size
        self.num_attention_heads = num_attention_heads
        super().__init__(**more)
