"""Published runs of other programs, as rows of a table: what each row says, and what the planner says of it."""
