"""The methods: one folder a paper, with its card and settings (no torch), its ``client`` and, unless that is the mean,
its ``server``.

Imports ``rows``, ``engine`` (clients alone) and ``server`` (servers alone). Refuses the lab, tasks' readers, a network.
"""
