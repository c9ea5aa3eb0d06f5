"""The run folder: its files, and the job that owns it."""
