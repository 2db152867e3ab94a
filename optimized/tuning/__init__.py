"""Tuning: measures the choices of the portable kernels on a device, and uses what was measured."""
