"""The operations of which one body serves both twins, in the twins' own folders.

`pagetwin.reference` and `pagetwin.optimized` re-export each of them. A file here that both twins
have too holds the part that they share.
"""
