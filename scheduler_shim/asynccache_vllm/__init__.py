"""asynccache's stores as a secondary tier of vLLM's offloading connector."""
