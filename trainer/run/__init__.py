"""The run folder and what goes into it: checkpoints, resume, metrics, progress, summary."""
