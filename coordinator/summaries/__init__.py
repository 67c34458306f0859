"""Summary requests and what the sites tell for them: kept, and pooled for the operator to write a study from.

Imports ``wardround``, ``coordinator.storage``, ``coordinator.answers`` and the settings of tables. Knows no study.
"""
