"""The reports of `stoker plan`, and what the planner learns from measurements and runs."""
