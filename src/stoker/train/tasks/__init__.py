"""Tasks, one file each: what a job of it may say, what is learnt from which samples, what is measured and exported.

A file states ``TASK``, a `stoker.job.task_spec.TaskSpec`; being here is being registered.
"""

import stoker.job  # noqa: F401  # which reads the files of this folder: whoever imports one of them first waits for all
