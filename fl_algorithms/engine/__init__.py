"""What a site runs, whatever the method: hooks, the training loop, sessions, partition, weights, devices.

Imports the study, tasks and models. Refuses methods by name (the study brings its own), files of a site, a network.
"""
