"""Click logs: rows with labels, dense features and 64-bit ids, as columns on disk, ordered by time."""
