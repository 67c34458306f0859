"""What the sites say of their data before anybody approves, and how the operator sees it."""

import pytest

from coordinator.cli.printing import print_fits
from coordinator.study_answers import StudyFits
from tests.coordinator.conftest import Place, refused, study_document
from wardround.errors import BadData
from wardround.v1 import federation_pb2 as pb


def fits(place: Place) -> StudyFits:
    return StudyFits.from_document(place.ask("fit", study="trial"))


def test_each_sites_newest_word_is_kept_through_a_restart(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    alpha, bravo, _ = (place.join(site) for site in ("alpha", "bravo", "charlie"))
    place.create(sites=["alpha", "bravo", "charlie"])
    alpha.declare("trial", pb.DOES_NOT_FIT)
    alpha.declare("trial", pb.FITS, rows=412)
    bravo.declare("trial", pb.DOES_NOT_FIT)
    place.restart()
    found = fits(place)
    assert {site: (fit.fits, fit.rows) if fit else None for site, fit in found.sites.items()} == {
        "alpha": (True, 412), "bravo": (False, 0), "charlie": None,
    }  # fmt: skip
    status = place.status()
    assert (status["state"], [site["ready"] for site in status["sites"].values()]) == ("created", [False] * 3)
    print_fits(found)
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.strip().splitlines()]
    assert shown[0] == "site data rows said"
    assert shown[2].startswith("alpha fits 412 20")
    assert shown[3].startswith("bravo does not fit 20")
    assert shown[4:] == ["charlie not said", "", "1 of 3 sites fit, 1 have not said"]


def test_rows_in_another_form_than_the_studys_are_refused(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    alpha = place.join("alpha")
    tables = study_document(sites=["alpha"])
    tables["reported"]["counts"] = "bucketed"
    place.ask("create", document=tables, initial=str(place.initial))
    with refused("COUNT_INVALID\nthe number of rows is not in the form of the study's counts"):
        alpha.declare("trial", pb.FITS, rows=412)
    alpha.declare("trial", pb.FITS, rows=256)
    with refused("COUNT_INVALID"):
        alpha.declare("trial", pb.FITS, rows=2**40)
    print_fits(fits(place))
    assert capsys.readouterr().out.endswith("numbers of rows are bucketed, as the study says\n")


def test_a_word_about_another_revision_is_refused(place: Place) -> None:
    alpha = place.join("alpha")
    place.create(sites=["alpha"])
    with refused("REVISION_CHANGED"):
        alpha.declare("trial", pb.FITS, rows=3, revision=2)
    place.create(sites=["alpha"], rounds=7)
    alpha.declare("trial", pb.FITS, rows=3)
    assert fits(place).revision == 2


def test_a_study_that_is_not_there_has_no_fits(place: Place) -> None:
    with pytest.raises(BadData, match="there is no study `trial` here"):
        fits(place)
