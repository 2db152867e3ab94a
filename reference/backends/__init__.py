"""The attention backend of the reference."""
