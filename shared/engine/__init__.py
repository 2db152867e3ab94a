"""What an engine uses: the attention layer, the backend interface, the backend selector."""
