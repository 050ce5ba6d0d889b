"""Storage backends, a module or package each, found by their entry points. They know the contract, nothing else."""
