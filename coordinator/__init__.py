"""The coordinator: it invites hospitals, runs the rounds of their studies, and signs a receipt for each update.

Imports ``wardround`` and the server part of ``fl_algorithms``. Refuses torch, unless a study's method distills here.
"""
