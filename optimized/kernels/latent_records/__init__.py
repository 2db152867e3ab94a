"""Kernels of latent caches that store records of bytes: writes, gathers and decodes.

One file per format encodes and decodes tiles. `record.py` composes them. Codes are decoded in
registers, so no decoded cache is stored.
"""
