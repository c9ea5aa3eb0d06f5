"""`bigbatch preflight`: are the nodes of a job fit, and equal, before it trains on them?"""

UNFIT = 4
"""Exit code where something is wrong with a node, or between nodes."""
