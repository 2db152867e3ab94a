"""Calls of our operations as solutions, one file per family: `run` takes its inputs."""
