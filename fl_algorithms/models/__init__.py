"""The networks. Each is built from its settings and its numbers of inputs and outputs, and gives logits.

Imports torch and settings. Refuses nothing itself: ``fl_algorithms.resolving`` has checked that network and data fit.
"""
