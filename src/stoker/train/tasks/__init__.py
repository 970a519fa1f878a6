"""Tasks: what is learnt from which samples. The loop knows none of them."""
