"""What a person is shown and approves: the account of a study, consents, offers, what hinders an approved study.

Imports ``site_agent.state`` and the policy. A consent is what was shown, or it is none.
"""
