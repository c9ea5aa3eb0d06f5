"""`bigbatch report`: scaling efficiency and its causes, time to accuracy, cost."""
