"""Language models as a task: preparation, samples and their loss, sample answers."""
