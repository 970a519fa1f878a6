"""The command line: one verb, one file, no logic of its own."""
