"""What a run records in its folder, and what is compared with it when the run resumes."""
