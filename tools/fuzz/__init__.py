"""Fuzzing of everything that both programs parse: ``python -m tools.fuzz``, ``make fuzz``."""
