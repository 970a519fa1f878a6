"""Training: the loop, the tasks that it trains, and the code that assembles both from a job."""
