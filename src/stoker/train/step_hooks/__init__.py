"""What takes part in a step by hooks or keeps state between steps: warm-up, averages, islands, compression, a log."""
