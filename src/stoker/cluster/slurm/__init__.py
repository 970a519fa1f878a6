"""Clusters with Slurm: the script that sbatch takes, and what squeue and sacct say."""
