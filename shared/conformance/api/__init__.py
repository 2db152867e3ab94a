"""What users call: the check of all laws, fuzzing, the probe, and pytest."""
