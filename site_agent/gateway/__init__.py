"""The process that has the network: assignments in, updates out (``agent``, ``inbox``, ``round``), people's commands.

Imports ``site_agent.state`` and ``wardround`` alone. Refuses torch, patients' data and private modules, and everything
that neither consent nor policy lets out.
"""
