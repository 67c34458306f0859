"""How many sites must agree before a sum is opened, and what that stands: pure arithmetic about n, t and c.

n   sites of the roster
t   the threshold: shares that give a secret, signatures that open a set
c   sites that work with the coordinator, break the rules, or were put back to an older state

2 t > n + c    two different sets never both gather t signatures, since each of the n - c others signs one
t >= c + 2     a set holds at least two sites that none of the c can tell apart
"""

from dataclasses import dataclass

from wardround.errors import BadData

FEWEST = 3  # sites of a study: of two, each learns the other's vector from the sum
MOST = 255  # sites: the points of GF(256) other than 0


def default_threshold(sites: int) -> int:
    """floor(2 n / 3) + 1."""
    return 2 * sites // 3 + 1


@dataclass(frozen=True)
class Rules:
    """n, t and c of a study. Making one checks that they hold together.

    Raises:
        BadData: too few or too many sites, or a threshold that does not stand so many colluding sites.
    """

    sites: int
    threshold: int
    colluding: int

    def __post_init__(self) -> None:
        n, t, c = self.sites, self.threshold, self.colluding
        if not FEWEST <= n <= MOST:
            raise BadData(f"secure aggregation is for {FEWEST} to {MOST} sites, the study has {n}")
        if c < 1:
            raise BadData(
                f"`colluding` is {c}, and every member sees what it may check, so at least 1 is counted",
                hint="`colluding = 1` in [secure_aggregation]",
            )
        if not t <= n:
            raise BadData(f"`threshold` is {t}, and the study has {n} sites")
        if not self.stands(c):
            raise BadData(
                f"a threshold of {t} of {n} sites does not stand {c} that collude: two different sets could both be "
                f"opened, or a sum holds fewer than two others; it stands {self.most}",
                hint=f"`threshold` of at least {max((n + c) // 2 + 1, c + 2)}, more sites, or a smaller `colluding`",
            )

    @classmethod
    def of(cls, sites: int, threshold: int | None, colluding: int) -> "Rules":
        """With the default threshold where the study says none."""
        return cls(sites, default_threshold(sites) if threshold is None else threshold, colluding)

    def stands(self, colluding: int) -> bool:
        """Whether so many sites may work with the coordinator."""
        return 2 * self.threshold > self.sites + colluding and self.threshold >= colluding + 2

    @property
    def most(self) -> int:
        """How many colluding sites the threshold stands; negative where it stands none."""
        return min(2 * self.threshold - self.sites - 1, self.threshold - 2)
