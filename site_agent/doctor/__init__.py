"""``site-agent doctor``: what keeps this site from taking part, each thing with its cause and its fix.

Imports the gateway, the state directory and the conversation with the trainer; no torch, and no patient's file: what
reads data is asked of the trainer. Refuses to change anything: it looks, and says which command would.
"""

from site_agent.doctor.examination import examine

__all__ = ["examine"]
