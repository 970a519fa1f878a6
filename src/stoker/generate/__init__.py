"""Text generation from a model in memory: one engine for chat, samples, evaluation, rollouts and serving."""
