"""The endpoints of OpenAI's API: bodies of requests, answers, streams, tool calls."""
