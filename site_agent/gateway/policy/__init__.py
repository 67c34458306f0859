"""What may leave this hospital: the file that a person writes, what it decides of a study, and a proposal of one.

Imports ``site_agent.state`` alone. Default deny: what no rule allows is refused, and so is a file with an unknown key.
"""
