"""Stand-ins that the vLLM example, the tests and the benchmark need where there is no GPU and no model."""
