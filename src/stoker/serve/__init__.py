"""Serves models over HTTP: OpenAI's API over the engine that generates, or in front of llama.cpp's or vLLM's server."""
