"""Click logs: rows with labels, dense features and 64-bit ids, as columns on disk, ordered by time."""

import stoker.job  # noqa: F401 -- before the files here: it loads the tasks, and that of ranking imports `ranking_block`
