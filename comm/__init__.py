"""Gradient communication: process start, topology, fusion, all-reduce algorithms."""
