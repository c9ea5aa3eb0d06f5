"""`bigbatch comm bench`: all-reduces by size."""
