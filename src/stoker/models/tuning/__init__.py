"""What `tune` adds to a model: LoRA, virtual tokens, quantised bases."""
