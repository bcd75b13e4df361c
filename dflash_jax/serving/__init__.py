"""Requests in, text out: slots, the engine's loop and `LLM`."""
