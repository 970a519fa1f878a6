"""Verification that a layout computes what one process and a plain PyTorch loop compute, on a small copy of the job."""
