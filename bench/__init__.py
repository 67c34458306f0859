"""What a round costs, measured over real processes: `python -m bench`, which `make bench` calls.

Every measurement is a JSON line; a table of them all comes last. Imports the programs' commands through
``tools.world``, and of the tests the simulated hospital. ``bench.counts`` has what does not depend on a machine's
speed, and the most that it may be.
"""
