"""The parts of ``examples/openai_server.py``: text, models, the protocol, one engine, its routes."""
