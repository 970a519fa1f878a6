"""Figures measured on a machine or learnt from finished runs, which the planner uses."""
