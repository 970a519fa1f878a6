"""The blocks of a job file, one file each: every key with its type, default and description."""
