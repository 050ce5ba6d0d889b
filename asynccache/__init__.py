"""asynccache: a hierarchical KV cache for async LLM serving stacks. The public names, nothing else."""
