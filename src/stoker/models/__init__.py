"""Models: sources, loading, adapters, packed attention and the chunked loss."""
