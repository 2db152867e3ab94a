"""The next tokens: how they are chosen, and where they go."""
