"""Rendezvous of a job's ranks, its key-value store, and failure detection."""
