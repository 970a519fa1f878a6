"""Training of ranking models: the job's block, samples of a click log, tables in the step and in checkpoints."""
