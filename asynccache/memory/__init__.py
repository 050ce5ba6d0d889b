"""Memory, and how bytes move in it: pools, devices, and the mover that performs the core's moves."""
