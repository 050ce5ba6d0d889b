"""The runtime owns every task: it performs a plan's effects as asyncio stages and returns each outcome to the core."""
