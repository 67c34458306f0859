"""One class for each thing that crosses a border, with its codecs beside it.

Imports ``wardround.signing`` and ``wardround.tensors``. Refuses what is not of its form, once, here; inside it can be
trusted.
"""
