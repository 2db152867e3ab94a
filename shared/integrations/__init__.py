"""Integrations: other libraries that run on the twins.

Each folder connects one library. Only that folder imports the library.
"""
