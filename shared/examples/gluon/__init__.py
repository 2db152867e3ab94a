"""Small Gluon kernels, one per file, to be interpreted: `pagetwin interpret ring.py`.

Each file defines `launches()`, which yields its kernel with arguments, and compares the result.
"""
