"""Adapters that carry the codec into other packages. Nothing is imported until it is asked for."""
