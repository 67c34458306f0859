"""A site's ledger as typed records: ``lines`` (a line and its form on disk), ``entries`` (one class for each type).

Imports ``wardround.signing`` and ``wardround.records.receipts``. Refuses a known field that has not its form; types and
fields of a later version pass, and are written again as they were.
"""
