"""What a study file may say about tasks, networks and methods.

Imports pydantic alone, so that the coordinator and every `--help` can read it. Refuses unknown keys and impossible
values.
"""
