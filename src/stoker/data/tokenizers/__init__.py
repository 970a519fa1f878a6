"""Tokenizers trained from a corpus, and vocabularies that are extended."""
