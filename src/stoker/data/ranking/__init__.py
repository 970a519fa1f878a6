"""Click logs: rows with labels, dense features and 64-bit ids, as columns on the disk, in the order of time."""
