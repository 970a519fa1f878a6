"""Model serving over HTTP: OpenAI's API on Stoker's own engine, or in front of llama.cpp's or vLLM's server."""
