"""Loggers: where the numbers of metrics.jsonl go besides, loaded if run.loggers names them."""
