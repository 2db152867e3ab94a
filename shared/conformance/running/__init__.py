"""How laws are run: worker processes, trials, time limits, smaller failing cases."""
