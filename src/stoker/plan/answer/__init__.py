"""What a plan means: what it costs, what binds it, what would help, why others lost; in words, numbers and pictures."""
