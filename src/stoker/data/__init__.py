"""Data: sources and formats, templates and masks, the token cache, mixing, packing, the order, the audit."""
