"""Taking the network away from the process that reads patients, by the kernel.

Imports the standard library alone, so that it runs before anything that could use a network.
"""
