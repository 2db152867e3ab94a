"""The laws, one file per subject; each law is one function."""
