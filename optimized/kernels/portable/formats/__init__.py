"""Cache formats in kernels: one file per format.

Each file decodes KV tiles, and applies the scales of keys and values where they cost least: to the
scores and the results if there is one per head, to the scores and the weights if there is one per
token. `cache_format.py` composes them.
"""
