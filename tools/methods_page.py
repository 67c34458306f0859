"""Writes docs/methods.md from the registry; a test compares. ``python -m tools.methods_page``"""

from pathlib import Path

from fl_algorithms.lab.methods import SHOWN, overview, rules, sums_alone

PAGE = Path(__file__).resolve().parents[1] / "docs" / "methods.md"
HEAD = """# Methods

This page is for researchers who choose a method, and for hospitals that ask what a method takes out. After it you know
for each method what leaves a site, what stays, what it needs, and in what it is known to differ from its paper. How to
run one: [researchers.md](researchers.md). How to add one: [adding-a-method.md](adding-a-method.md). Terms:
[glossary](glossary.md).

`python -m tools.methods_page` writes this page from the registry of methods, which `fl-lab methods` prints too.
`fl-lab methods NAME` has a method's settings. Each federated method runs in the lab and across hospitals with the same
code, and ends with the same digest.

| `name` | method | what leaves a site | what stays | needs | sums alone | differs from the paper in |
|---|---|---|---|---|---|---|
"""
TAIL = """
Two baselines are no methods: Local (*Client j*) comes from the runs of `silo`, and Central is a row of
`kind = "central"` in a suite ([researchers.md](researchers.md#comparing-methods)).

Where a method's coordinator takes a mean (its card says so), a study may have another rule under `[aggregation]`:
[robust-aggregation.md](robust-aggregation.md).

| `rule` | in place of the mean | needs updates | tolerates bad sites | rows count |
|---|---|---|---|---|
{rules}
*Sums alone*: whether a study may have `[secure_aggregation]`. Its coordinator then never has a single update: in the
lab so far, not between hospitals ([the decision](decisions/0015-secure-aggregation.md)). The others need single ones:

{single}
A hospital's policy blocks these methods until it allows them in `[models]` ([policy.md](policy.md#models)):

"""


def page() -> str:
    rows, exposed, single = [], [], []
    for row in overview():
        name = f"`{row['name']}`" + (" (lab only)" if row["lab_only"] else "")
        title, _, link = str(row["paper"]).rpartition(", https://")
        method = f"[{row['title']}](https://{link}), {title}" if title else f"{row['title']}: {row['paper']}"
        needs = "; ".join(row["needs"]) or "–"
        told = (row["upload"], row["private"], needs, sums_alone(row), row["differs"] or "–")
        rows.append(f"| {name} | {method} | {' | '.join(told)} |\n")
        if row["single_updates"]:
            single.append(f"* `{row['name']}`: {row['single_updates']}.\n")
        if row["exposure"]:
            exposed.append(f"* `{row['name']}`: {SHOWN[row['exposure']].format(row['personalized'])}.\n")
    robust = []
    for rule in rules():
        title, _, link = rule["paper"].rpartition(", https://")
        what = f"[{rule['title']}](https://{link}), {title}"
        robust.append(f"| `{rule['name']}` | {what} | {rule['needs']} | {rule['tolerates']} | {rule['rows']} |\n")
    return (
        HEAD
        + "".join(rows)
        + TAIL.replace("{rules}", "".join(robust)).replace("{single}", "".join(single))
        + "".join(exposed)
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
