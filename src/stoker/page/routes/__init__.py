"""The page's API, a file for each group of requests."""
