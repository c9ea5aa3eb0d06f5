"""`bigbatch report`: the results of runs, side by side."""
