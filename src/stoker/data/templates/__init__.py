"""Conversations to tokens by a chat template, with the spans that are trained."""
