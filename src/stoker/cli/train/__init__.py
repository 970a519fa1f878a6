"""The start of a run by `stoker train` and `stoker node`: one job, the stages of a job file, a log that grows."""
