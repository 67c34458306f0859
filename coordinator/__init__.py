"""The coordinator: invites hospitals, runs the rounds of their studies, and keeps no torch."""
