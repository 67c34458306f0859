"""Tensors as they are named, described and stored: specs, manifests, safetensors files read in place.

Imports ``wardround.signing`` alone, no torch. Refuses a file or a manifest that is not exactly of its form.
"""
