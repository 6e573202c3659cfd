"""TQ-Offload: stored LLM KV cache about 4x smaller with TurboQuant (arXiv 2504.19874)."""

__version__ = "0.1.0"
__all__ = ["__version__"]
