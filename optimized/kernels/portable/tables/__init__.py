"""Tables of the portable kernels: what a tuning file replaces, and which tables a device has."""
