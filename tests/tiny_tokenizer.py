"""The tiny tokenizer of the tests and of the fuzzer."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

LEARNT_FROM = [
    "What is the capital of France? The capital of France is Paris.",
    "user\nassistant\nsystem\n### Instruction:\n### Response:\n",
    "Write a poem about the sea, please. The sea is blue and the wind is cold.",
    "How are you today? I am well, thank you. You are a helpful assistant.",
] * 4
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>")


def tiny_tokenizer(ids: int = 400) -> Tokenizer:
    """A byte-level BPE with the special tokens of ChatML."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=ids,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LEARNT_FROM, trainer)
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """A BPE of Llama 2's kind: a prepended space, and a token for each byte; other tokens are a, b and a space."""
    special = ("<unk>", "<s>", "</s>")
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b", "▁", "▁a", "▁b"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [("▁", "a"), ("▁", "b")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer
