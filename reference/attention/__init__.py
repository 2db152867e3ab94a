"""Attention in plain torch: paged, encoder, latent, cascade, context parallel, and the merge of
partial results.
"""
