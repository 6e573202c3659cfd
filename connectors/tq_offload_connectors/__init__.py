"""Stores for encoded KV cache, and what carries them into LMCache. The paths of these modules are public API."""
