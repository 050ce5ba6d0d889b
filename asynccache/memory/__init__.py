"""Where bytes sit and how they move: pools, devices, and the mover that performs the core's moves."""
