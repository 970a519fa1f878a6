"""Clusters with Slurm: the script for sbatch, and job states from squeue and sacct."""
