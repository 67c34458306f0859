"""Secure aggregation: sums of the sites' vectors that the coordinator cannot take apart, and any member can check.

Imports ``cryptography``, numpy, ``wardround.signing`` and ``wardround.tensors``. Refuses files, networks and torch:
what is here computes and judges; whoever calls it makes durable and sends.
docs/decisions/0015-secure-aggregation.md has the argument.
"""
