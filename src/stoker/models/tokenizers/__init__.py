"""Tokenizers of models: opened, limited to what the model embeds, and saved."""
