"""Inference engines: vLLM in local processes, and HTTP servers."""
