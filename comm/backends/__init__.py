"""Transports behind one contract: one process, torch.distributed (NCCL, gloo), MPI."""
