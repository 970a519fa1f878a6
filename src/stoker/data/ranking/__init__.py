"""Click logs: rows with labels, dense features and 64-bit ids, as columns on disk, ordered by time."""

import stoker.job  # noqa: F401 - first, as the tasks that it loads import files of this folder
