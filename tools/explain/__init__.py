"""`bigbatch explain`: the ranks that made a job hang, from dumps of torch's flight recorder."""
