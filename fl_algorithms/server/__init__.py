"""What the methods do at the coordinator, block by block. The lab runs the same code.

Imports numpy and settings, never torch (FedDF distills in a process of its own). Refuses a result beyond float32.
"""
