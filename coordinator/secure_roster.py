"""Who is in a study with secure aggregation, by the keys that sign there: written into it when it is created."""

from dataclasses import replace

import sqlalchemy as sa

from coordinator.storage import tables
from coordinator.storage.database import Store
from fl_algorithms.server.aggregator import Specs, server_aggregator
from fl_algorithms.server.secure_sums import largest_weight
from fl_algorithms.study import ResolvedStudy
from wardround.errors import NeedsPerson


def with_roster(store: Store, file: ResolvedStudy, specs: Specs) -> ResolvedStudy:
    """The study with its sites' ledger keys as they are now, and with a largest weight of 1 where all count alike; as
    it is without secure aggregation. So what a hospital approves says with whom it is summed.

    Raises:
        NeedsPerson: a site has not enrolled, or was revoked.
    """
    section = file.secure_aggregation
    if section is None:
        return file
    table = tables.Site
    chosen = sa.select(table.name, table.ledger_key).where(table.revoked_s.is_(None))
    with store.read() as session:
        keys = {name: key for name, key in session.execute(chosen) if name in file.study.sites}
    if missing := [site for site in file.study.sites if site not in keys]:
        raise NeedsPerson(
            f"with [secure_aggregation] a study names its sites' keys, and {', '.join(missing)} have not enrolled",
            hint=f"`coordinator invite {missing[0]}`, and create the study when all have joined",
        )
    weight = largest_weight(file, server_aggregator(file, specs))
    filled = section.model_copy(update={"roster": dict(sorted(keys.items())), "largest_weight": weight})
    return replace(file, file=file.file.model_copy(update={"secure_aggregation": filled}))
