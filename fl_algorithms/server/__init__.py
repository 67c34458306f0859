"""What the methods do at the coordinator, in numpy, block by block. The lab runs the same code."""
