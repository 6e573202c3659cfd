"""The guard: what a preset does to a model, measured before deployment. Importing it does not import transformers."""
