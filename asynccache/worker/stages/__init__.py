"""The transfer stages: a queue and its workers each. Queues have no bound; the core bounds what is in flight."""
