"""From opened shares to the masks that a sum still has, by the coordinator, and again by anyone who checks it.

Of a site in the set the self mask is opened, of a site of the group that is not in it the mask key: never both. What is
combined is compared with what its site had signed, so wrong shares are found, and who gave them is named.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from wardround.errors import BadData, TryAgain
from wardround.secure import shamir
from wardround.secure.keys import SELF_MASK, Secrets, agreed, commitment, derive, public_of
from wardround.secure.masking import Mask
from wardround.secure.statements import Context, Keys, Opened, Roster, group_digest

TRIES = 2000  # combinations of shares that are looked at where some are wrong


@dataclass(frozen=True)
class Group:
    """The sites whose masks are in each other's vectors, by their keys, in the order of their names."""

    context: Context
    members: tuple[Keys, ...]

    @property
    def sites(self) -> tuple[str, ...]:
        return tuple(one.site for one in self.members)

    @cached_property
    def digest(self) -> str:
        return group_digest(self.context, self.members)

    def of(self, site: str) -> Keys:
        """Raises BadData: it is not in the group."""
        for one in self.members:
            if one.site == site:
                return one
        raise BadData(f"site `{site[:64]}` is not in this round's group")


@dataclass(frozen=True)
class OpenedSecrets:
    """What was opened of a round: self masks of the set, mask keys of the group's others. No secret any more: it is
    shown to every member, who needs it to check the sum.
    """

    self_masks: Mapping[str, bytes]
    mask_keys: Mapping[str, bytes]

    def refuse_other(self, group: Group, chosen: Iterable[str]) -> None:
        """Raises BadData: they are not those of this set, or not what their sites had signed."""
        within = set(chosen)
        if self.self_masks.keys() != within or self.mask_keys.keys() != set(group.sites) - within:
            raise BadData("what was opened is not the self masks of the set and the mask keys of the others")
        for site, self_mask in self.self_masks.items():
            if not _is_self_mask(group.of(site), self_mask):
                raise BadData(f"what was opened as the self mask of site `{site}` is another than it had signed")
        for site, mask_key in self.mask_keys.items():
            if not _is_mask_key(group.of(site), mask_key):
                raise BadData(f"what was opened as the mask key of site `{site}` is another than it had signed")


def own_masks(secrets: Secrets, site: str, group: Group, label: str) -> list[Mask]:
    """What a site adds to one part of its vector: its own mask, and one with each peer, of the sign of their order."""
    pairs = [_pair(secrets.mask_key, site, peer, group, label) for peer in group.members if peer.site != site]
    return [_own(secrets.self_mask, group, label), *pairs]


def remaining(opened: OpenedSecrets, group: Group, chosen: Iterable[str], label: str) -> list[Mask]:
    """What must be added to the sum of the set's vectors so that no mask is left in it.

    Raises:
        BadData: what was opened is not what its sites had signed.
    """
    within = sorted(chosen)
    opened.refuse_other(group, within)
    masks = [_own(opened.self_masks[site], group, label).undone for site in within]
    for gone, mask_key in sorted(opened.mask_keys.items()):
        # What the one that is gone would have added is what cancels the peer's share of it.
        masks += [_pair(mask_key, gone, group.of(peer), group, label) for peer in within]
    return masks


def combined(
    openings: Sequence[Opened], group: Group, chosen: Iterable[str], roster: Roster, threshold: int
) -> tuple[OpenedSecrets, tuple[str, ...]]:
    """The opened secrets, and the sites that gave a wrong share.

    Raises:
        TryAgain: fewer than ``threshold`` openings, or too many wrong ones among them; more may come.
    """
    within, wrong = set(chosen), set[str]()
    self_masks, mask_keys = {}, {}
    for keys in group.members:
        site = keys.site
        if site in within:
            shares = {one.site: bytes.fromhex(one.self_masks[site]) for one in openings if site in one.self_masks}
            self_masks[site], liars = _secret(shares, roster, threshold, partial(_is_self_mask, keys), site)
        else:
            shares = {one.site: bytes.fromhex(one.mask_keys[site]) for one in openings if site in one.mask_keys}
            mask_keys[site], liars = _secret(shares, roster, threshold, partial(_is_mask_key, keys), site)
        wrong |= liars
    return OpenedSecrets(self_masks, mask_keys), tuple(sorted(wrong))


def _is_self_mask(keys: Keys, secret: bytes) -> bool:
    return commitment(secret, keys.context.digest) == keys.self_mask


def _is_mask_key(keys: Keys, secret: bytes) -> bool:
    return public_of(secret) == keys.mask_key


def _secret(
    shares: Mapping[str, bytes], roster: Roster, threshold: int, fits: Callable[[bytes], bool], owner: str
) -> tuple[bytes, set[str]]:
    if len(shares) < threshold:
        raise TryAgain(f"{len(shares)} sites opened what they hold of site `{owner}`, {threshold} are needed")
    points = {roster.point(site): share for site, share in sorted(shares.items())}
    for some in itertools.islice(_choices(list(points), threshold), TRIES):
        right = {point: points[point] for point in some}
        secret = shamir.combine(right)
        if fits(secret):
            return secret, {
                site for site in shares if not _is_on(points[roster.point(site)], roster.point(site), right)
            }
    raise TryAgain(
        f"the shares of {len(shares)} sites do not give what site `{owner}` had signed",
        hint="some gave wrong ones, or it dealt wrong ones: the round cannot be opened before more sites do",
    )


def _choices(points: Sequence[int], count: int) -> Iterator[Sequence[int]]:
    """``count`` of the points, in every way, the fewest left out first: so one or two wrong shares are soon avoided,
    whosever they are."""
    for fewer in range(len(points) - count + 1):
        for gone in itertools.combinations(points, fewer):
            some = [point for point in points if point not in gone][:count]
            if not gone or gone[-1] < some[-1]:  # else the same as with fewer left out
                yield some


def _is_on(share: bytes, point: int, right: Mapping[int, bytes]) -> bool:
    """Whether a share is on the polynomial of t right ones: with it in place of another, the secret is the same."""
    if point in right:
        return True
    others = dict(itertools.islice(right.items(), len(right) - 1))
    return shamir.combine({**others, point: share}) == shamir.combine(right)


def _own(self_mask: bytes, group: Group, label: str) -> Mask:
    return Mask(derive(self_mask, SELF_MASK, group.context.digest, group.digest, label), 1)


def _pair(mask_key: bytes, site: str, peer: Keys, group: Group, label: str) -> Mask:
    """The mask of two sites as ``site`` has it: the first by name adds, the other takes away."""
    first, second = sorted((site, peer.site))
    common = agreed(mask_key, peer.mask_key)
    seed = derive(common, "pair", group.context.digest, group.digest, first, second, label)
    return Mask(seed, 1 if site == first else -1)
