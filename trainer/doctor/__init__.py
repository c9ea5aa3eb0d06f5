"""`bigbatch doctor`: what limits a run on this machine, and what each known speedup is worth here."""
