"""What a job is: its words, options, hosts, and how it is run in the foreground."""
