"""The methods, each one file that reads like its paper; the networks, the tasks, and the lab that compares them.

Imports ``wardround`` and never coordinator, site_agent or a network library. Refuses what is not installed: a study
names methods, networks and tasks, and can never name code.
"""
