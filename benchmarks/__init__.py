"""Real deployments of vLLM and LMCache, and what is measured on them."""
