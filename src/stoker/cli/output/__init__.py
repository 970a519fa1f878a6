"""Output of commands on the terminal: tables, amounts, problems, views of data and runs."""
