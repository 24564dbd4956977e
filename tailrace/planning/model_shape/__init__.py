"""The sizes of a model, from its config.json or by its name.

base          sizes, and what follows from them: parameters, cache, operations
hugging_face  sizes from a config.json
catalogue     models that are known by name
"""
