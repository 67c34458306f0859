"""The coordinator's half of the methods, in numpy, block by block. The lab runs the same code."""
