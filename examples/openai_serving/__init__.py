"""The parts of ``examples/openai_server.py``: text, models, protocol, ways to compute, service and routes."""
