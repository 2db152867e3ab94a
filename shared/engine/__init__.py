"""What an engine uses: attention layer, backend interface, selector, versions of triton."""
