"""A study's rounds on this hospital's data: described, checked, trained, validated, and predictions from its models.

Imports torch, ``fl_algorithms``, the vault and where the data lies. Refuses data, weights and networks other than those
that a person approved.
"""
