"""Jobs from the browser: their keys, edits of their YAML, checks, and verbs on them."""
