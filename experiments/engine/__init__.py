"""Make, start, resume and judge points; each is a complete experiment and the place where it runs."""
