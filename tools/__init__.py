"""What a user runs beside the loop; train.py imports the launcher of vLLM, nothing else."""
