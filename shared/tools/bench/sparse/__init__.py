"""Workloads of sparse attention: inputs, minimum of bytes and operations, accuracy checks."""
