"""What a hospital lets its vector be summed with: pure judgements about a roster and about a set.

Peers are known to people, not appointed by the coordinator. Whom nobody here knows may be an invention, and inventions
sign whatever they are asked to: so in all arithmetic they count as colluding.
"""

from collections.abc import Collection
from dataclasses import dataclass

from wardround.errors import BadData, NotPermitted
from wardround.secure.rules import FEWEST, Rules
from wardround.secure.statements import Roster

CODE = "DECLINED_POLICY"


@dataclass(frozen=True)
class Policy:
    """[secure_aggregation] of a site's policy.

    Attributes:
        known: fingerprints of the signing keys that this hospital's people have compared with their peers'.
        min_sites: the fewest sites in a sum that this site helps to open.
        min_known: of these, the fewest beside itself that its people know.
        colluding: how many of those that they know may work with the coordinator.
    """

    known: frozenset[str]
    min_sites: int = FEWEST
    min_known: int = 2
    colluding: int = 1

    def __post_init__(self) -> None:
        if self.colluding < 1 or self.min_sites < self.colluding + 2 or self.min_known < self.colluding + 1:
            raise BadData(
                f"`colluding` {self.colluding}, `min_sites` {self.min_sites} and `min_known` {self.min_known} in "
                "[secure_aggregation] of the policy leave a sum in which somebody stands alone",
                hint="`colluding` at least 1, `min_sites` at least 2 and `min_known` at least 1 more",
            )

    def strangers(self, roster: Roster, site: str) -> tuple[str, ...]:
        """The members, beside ``site`` itself, whom its people do not know."""
        return tuple(one for one in roster.sites if one != site and roster.fingerprint(one) not in self.known)

    def refuse_roster(self, roster: Roster, site: str, rules: Rules) -> None:
        """Before a study is approved.

        Raises:
            NotPermitted: strangers and colluding members together could have two sets opened, or single this site out.
            BadData: the site is not in the roster, or the rules are of another one.
        """
        roster.point(site)
        if rules.sites != len(roster.sites):
            raise BadData(f"rules for {rules.sites} sites, and a roster of {len(roster.sites)}")
        strangers = self.strangers(roster, site)
        count = len(strangers) + max(self.colluding, rules.colluding)
        if not rules.stands(count):
            named = f"; nobody here knows {', '.join(f'`{one}`' for one in strangers[:6])}" if strangers else ""
            raise NotPermitted(
                f"a threshold of {rules.threshold} of {rules.sites} sites stands {rules.most} that may work with the "
                f"coordinator, and here are {count}{named}",
                hint="compare the fingerprints of their keys by telephone"
                if strangers
                else "a study with a higher `threshold` or more sites",
                code=CODE,
            )

    def refuse_set(self, roster: Roster, site: str, chosen: Collection[str], rules: Rules) -> None:
        """Raises NotPermitted: the set is smaller than threshold or policy want it, or has too few that are known."""
        fewest = max(self.min_sites, rules.threshold)
        if len(chosen) < fewest:
            raise NotPermitted(f"a set of {len(chosen)} sites, at least {fewest} are summed", code=CODE)
        known = set(chosen) - {site, *self.strangers(roster, site)}
        if len(known) < self.min_known:
            raise NotPermitted(
                f"a set with {len(known)} sites that people here know, the policy wants {self.min_known}", code=CODE
            )


@dataclass(frozen=True)
class Pledge:
    """A set that this site signed. study, base, context, chosen: digests, of the attempt's context and of the set."""

    study: str
    round: int
    base: str
    context: str
    chosen: str
    sites: tuple[str, ...]


@dataclass(frozen=True)
class Pledges:
    """Every set that a site signed for the studies that go on. What must never be forgotten."""

    signed: tuple[Pledge, ...] = ()

    def plus(self, pledge: Pledge) -> "Pledges":
        """With one more; the same one again changes nothing.

        Two sums from the same model over sets that differ in one site may tell what that site added. So one set is
        signed for a round, whatever the attempt, and sets of the same sites for a model, whatever the round, the
        revision or the study.

        Raises:
            NotPermitted: another set was signed for this round, or one of other sites from this model.
        """
        if pledge in self.signed:
            return self
        for one in self.signed:
            if one.study == pledge.study and one.round == pledge.round:
                raise NotPermitted(
                    f"this site has signed another set for round {pledge.round} and signs no second one", code=CODE
                )
            if one.base == pledge.base and one.sites != pledge.sites:
                same = one.study == pledge.study
                of = "" if same else f" of the study with digest {one.study[:12]}…"
                raise NotPermitted(
                    f"this site has signed a set of other sites for round {one.round}{of}, which began with the same "
                    f"model as round {pledge.round}; both sums together could tell one site's part",
                    hint="a sum that was agreed is opened when enough sites are back; else people begin a new revision"
                    if same
                    else "with other sites, a study begins with a model of its own: another `seed`",
                    code=CODE,
                )
        return Pledges((*self.signed, pledge))
