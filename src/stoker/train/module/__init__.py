"""A user's own module as a task: preparation, samples and their loss, import of its code."""
