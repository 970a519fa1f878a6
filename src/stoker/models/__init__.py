"""Models: where they come from, how they are loaded, adapters, the packed attention and the chunked loss."""
