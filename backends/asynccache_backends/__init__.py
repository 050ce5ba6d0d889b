"""Storage backends, one module or package each, found by their entry points. They know the contract and nothing else."""
