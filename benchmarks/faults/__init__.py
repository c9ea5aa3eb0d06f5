"""What failures cost a job, beside others' ways to survive them."""
