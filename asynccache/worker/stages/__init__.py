"""The transfer stages. Each has a queue and the tasks that serve it. Queues have no bound, because the core bounds the
operations in flight."""
