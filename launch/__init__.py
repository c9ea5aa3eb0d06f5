"""From the login node: argument lists and scripts that start a job. Never imports torch."""
