"""Who is there, and that they stay."""
