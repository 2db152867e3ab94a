"""What launches any kernel: launcher, workspace, capture, torch operators, plan caches."""
