"""Hardware that vLLM-Omni does not know by itself."""
