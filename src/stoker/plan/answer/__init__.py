"""Reports a plan: cost, bottlenecks, improvements, alternatives; as text, JSON and pictures."""
