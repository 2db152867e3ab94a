"""The latent decode kernel for Hopper GPUs."""
