"""What a run tells: progress, metrics, loggers, plot and summary."""
