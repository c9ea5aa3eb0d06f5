"""Cost of failures for a job, beside others' ways to survive them."""
