"""The command line: one verb, one file; faces without logic of their own."""
