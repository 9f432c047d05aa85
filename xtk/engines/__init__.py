"""Floor 2: what others wrote to run models: vLLM, in this machine's processes or behind HTTP."""
