"""Who may use the page, and which paths and URLs a request or a job from it may name."""
