"""What a run in half precision loses at each loss scale and on each wire, and what to take."""
