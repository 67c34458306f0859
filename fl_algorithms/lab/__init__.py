"""A federation in one process, to compare methods before a hospital is asked: suites, protocol, report, example data.

Imports all of ``fl_algorithms``; its commands import torch only when they run. Refuses to mix runs of different data or
versions.
"""
