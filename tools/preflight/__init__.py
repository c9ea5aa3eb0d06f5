"""`bigbatch preflight`: are the nodes of a job fit, and equal, before it trains on them?"""
