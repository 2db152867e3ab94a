"""The attention backends TRITON and XFORMERS."""
