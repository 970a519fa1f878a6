"""Columns of a row to a conversation, a text or a preference."""
