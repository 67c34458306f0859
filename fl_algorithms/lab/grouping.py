"""Warnings of many sites and columns, so that a person reads them all."""

import re
from collections.abc import Iterable

FEW = 3  # lines of one kind that are shown as they are
NAMED = 6  # sites in one line
_PARTICULAR = re.compile(r"`[^`]*`|\d+")


def grouped(warnings: Iterable[str]) -> list[str]:
    """``warnings``, each "SITE: text", with those that say the same of other sites, columns or counts as one line."""
    kinds: dict[str, list[tuple[str, str]]] = {}
    for warning in warnings:
        site, _, text = warning.partition(": ")
        kinds.setdefault(_PARTICULAR.sub("…", text), []).append((site, text))
    lines = []
    for group in kinds.values():
        if len(group) <= FEW:
            lines += [f"{site}: {text}" for site, text in group]
            continue
        sites = list(dict.fromkeys(site for site, _ in group))
        named = ", ".join(sites[:NAMED]) + (f" and {len(sites) - NAMED} more" if len(sites) > NAMED else "")
        lines.append(f"{group[0][0]}: {group[0][1]} (and {len(group) - 1} more of this kind, at {named})")
    return lines
