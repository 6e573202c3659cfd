"""TQ-Offload in LMCache. Importing this package imports neither lmcache nor vllm.

Modules that import lmcache: serde, processor, observer, adapter, plugin, device_plugin. The others are free of it.
"""
