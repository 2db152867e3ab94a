"""The metadata of one step: numpy on the host, Triton where it must stay on the device."""
