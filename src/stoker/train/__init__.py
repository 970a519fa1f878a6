"""Training: the loop, the tasks on top of it, and what assembles them from a job."""
