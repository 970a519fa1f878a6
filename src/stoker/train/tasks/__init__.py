"""Tasks, one file each: the job's block, the samples and objective, evaluation and export.

A file defines ``TASK``, a `stoker.job.task_spec.TaskSpec`; every file of this folder is registered.
"""

import stoker.job  # noqa: F401  # which reads the files of this folder: whoever imports one of them first waits for all
