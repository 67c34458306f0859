"""``coordinator``: the application, with one module for each group of its commands."""

from coordinator.cli import (
    authority,
    backups,
    curves,
    dashboard,
    doctor,
    journal,
    ledgers,
    members,
    models,
    second_person,
    setup,
    standby,
    studies,
    summaries,
)
from wardround.cli import application, run

app = application("coordinator", "Invite hospitals and run the rounds of their studies.")
app.command()(setup.init)
app.command()(setup.upgrade)
app.command()(setup.serve)
app.command()(doctor.doctor)
app.command()(backups.backup)
app.command()(backups.restore)
app.command()(members.invite)
app.command()(members.sites)
app.command()(members.revoke)
app.command()(ledgers.receipts)
app.command()(ledgers.rollover)
app.add_typer(authority.app, name="authority")
app.add_typer(journal.app, name="journal")
app.add_typer(second_person.app, name="second-person")
app.add_typer(standby.app, name="standby")
studies.app.command()(curves.export)
app.add_typer(studies.app, name="study")
app.add_typer(summaries.app, name="summary")
app.add_typer(models.app, name="models")
app.add_typer(dashboard.app, name="dashboard")


def main() -> None:
    """The command."""
    run(app)


if __name__ == "__main__":
    main()
