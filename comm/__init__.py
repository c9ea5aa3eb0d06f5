"""Gradients over the wire: process start, topology, fusion, all-reduce algorithms."""
