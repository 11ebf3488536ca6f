"""SLURM: jobs, steps and states, through its own commands."""
