"""When this site checks a sum: before it trains on the model that came of it, and when a person asks."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from site_agent.gateway.connection.backoff import TRIES_IN_TROUBLE, backoff
from site_agent.gateway.connection.interrupt import Interrupt
from site_agent.gateway.connection.session import Session
from site_agent.gateway.exit.ledger import Ledger
from site_agent.gateway.secure import terms
from site_agent.gateway.secure.attempts import Attempts
from site_agent.gateway.secure.checking import SAMPLE, WHOLE, Blockwise, Checked, Sum, check, drawn, evidence_of
from site_agent.gateway.secure.kept import BASE, MODEL, KeptSum, KeptVectors, name_of
from site_agent.state.consent import Consent
from wardround.errors import BadData, NotPermitted, TryAgain, Unavailable, UsageProblem
from wardround.local import durable
from wardround.records import secure_round
from wardround.records.assignment import Assignment, ModelRef
from wardround.records.ledger.secure import MISSED, OTHER, AgreedEntry, OpenedEntry, SumCheckedEntry
from wardround.records.secure_messages import BlocksWanted, SumEvidence
from wardround.signing import canonical
from wardround.tensors.files import TensorFile

NO_MODEL = canonical.digest("")  # in a line about a sum whose model nobody here has
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SumChecks:
    """Checks the sums of one site's studies."""

    session: Session
    ledger: Ledger
    attempts: Attempts
    sums: Path

    @contextmanager
    def keeping(self, consent: Consent, assignment: Assignment) -> Iterator[Path | None]:
        """Where the model of an assignment is kept, so that this round's sum, and the last one's, can be checked with
        it; None without secure aggregation. One that came in vain goes again: there may be another in each round."""
        if not consent.is_secure or assignment.base is None:
            yield None
            return
        place = self.attempts.model(consent.study, assignment.base.digest)
        had = place.exists()
        try:
            yield place
        except BaseException:
            if not had:
                durable.remove(place)
            raise

    def before_training(self, consent: Consent, assignment: Assignment, interrupt: Interrupt) -> None:
        """Check the sum of the last round that this site helped to open, if it was not checked yet: the model of
        ``assignment`` must be what it gives. The ledger says what was found.

        Another look would draw other blocks, and sooner or later miss the altered ones. So once a model of a study was
        found to be another than its sum gives, nothing is trained on in that study any more, whatever is shown.

        Raises:
            NotPermitted: the model is another than the sum gives, or one before it was; or what is shown is another
                set's, or the round that it is said to be of has too few signatures; this site goes on with none of
                these.
            BadData: what is shown is not what the sites signed.
            WardroundError: the coordinator does not show it.
        """
        if consent.is_secure and (found := self.ledger.pledged.refuted(consent.study_digest)) is not None:
            raise NotPermitted(
                f"the model of round {found.round} of `{found.study}` was found to be another than its sum gives: this "
                "site goes on with a new revision alone",
                hint="show this to the other hospitals; somebody here approves the new revision",
                code="DECLINED_MODEL_MISMATCH",
            )
        base, (opened, checked) = assignment.base, self.ledger.pledged.last_sum(consent.study_digest)
        if not consent.is_secure or base is None or (opened is not None and opened.round >= assignment.round):
            return
        if opened is None or base.round != opened.round:
            self._refuse_unsigned(consent, base, opened, checked, interrupt)
            if opened is not None:
                self._note(opened, NO_MODEL, Checked(MISSED, (), 0, ()))
                log.warning(
                    "the sum of round %d of `%s` was not checked: a round went on without this site", opened.round,
                    opened.study,
                )  # fmt: skip
            return
        self._checked(consent, opened, base.digest, interrupt)
        agreed = self._agreed(consent, opened.round)
        self.attempts.keep_models(consent.study, (agreed.base, base.digest))

    def believed(self, consent: Consent, best: ModelRef | None) -> ModelRef | None:
        """The best model that the coordinator names at the end, which nobody trains on any more; None where it is not
        the one whose sum was checked here. Of a round that went on without this site, it is the coordinator's word."""
        if best is None or not consent.is_secure:
            return best
        pledged = self.ledger.pledged
        known, refuted = pledged.model(consent.study_digest, best.round), pledged.refuted(consent.study_digest)
        if refuted is None and 1 <= best.round <= consent.rounds and known in ("", best.digest):
            if not known:
                log.warning(
                    "the best model of `%s` is that of round %d, whose sum was not checked here", consent.study,
                    best.round,
                )  # fmt: skip
            return best
        log.error(
            "the best model of `%s` that the coordinator names, of round %d, is not the one that was checked here: it "
            "is not kept; show this to the coordinator's operator and to the other hospitals",
            consent.study, best.round,
        )  # fmt: skip
        return None

    def by_hand(
        self, consent: Consent, round_: int, blocks: int | None, interrupt: Interrupt, *, keep: bool = False
    ) -> Checked:
        """Check a round's sum for a person: so many blocks, or all. With ``keep``, all that it is checked with is kept
        first, so that others can check it elsewhere.

        Raises:
            UsageProblem: this site did not sign a set of that round.
            WardroundError: as ``before_training``, but a model that is another than its sum is an answer here.
        """
        agreed = self._agreed(consent, round_)
        shown = self._shown(agreed.study, agreed.revision, agreed.round, interrupt)
        kept = self._keep(consent, agreed, shown) if keep else None
        return self._look(consent, agreed, shown, shown.model, blocks, kept)

    def _refuse_unsigned(
        self, consent: Consent, base: ModelRef, opened: OpenedEntry | None, checked: SumCheckedEntry | None,
        interrupt: Interrupt,
    ) -> None:  # fmt: skip
        """Refuse a model that no sum gives: of a round whose sum was checked here, any but the one that it gave; of one
        that went on without this site, one of a sum that the members did not open.

        A round that they opened has a member in each later set that checks its model. Else a coordinator could name a
        round that never was, or that was signed alone, and have every site miss the check.

        Raises:
            NotPermitted: it is another model, or one of a round behind; or what is shown is of another round or model.
            BadData: what is shown is not what its sites signed and opened.
        """
        newest = max((one.round for one in (opened, checked) if one is not None), default=0)
        if base.round < newest:
            raise NotPermitted(
                f"the coordinator goes back behind round {newest} of `{consent.study}`, which this site opened: it "
                f"sends the model of round {base.round}",
                hint="its operator begins a new revision, which somebody approves",
                code="DECLINED_MODEL_MISMATCH",
            )
        if base.round == 0:
            return  # the model that the study begins with, which is in the consent's digest
        if base.round == newest:
            if checked is None or checked.model != base.digest:
                raise NotPermitted(
                    f"the coordinator sends another model of round {base.round} of `{consent.study}` than the one that "
                    "was checked here",
                    hint="show this to the coordinator's operator and to the other hospitals",
                    code="DECLINED_MODEL_MISMATCH",
                )
            return
        shown = self._shown(consent.study, consent.revision, base.round, interrupt)
        file = terms.file_of(consent.document)
        sum_ = Sum(
            terms.layout_of(consent, file, closing=False), secure_round.roster_of(file),
            secure_round.rules_of(file).threshold, "", "", None, None, averages=False,
        )  # fmt: skip
        context = evidence_of(sum_, shown).group.context
        if (context.study, context.round, shown.model) != (consent.study_digest, base.round, base.digest):
            raise NotPermitted(
                f"the coordinator sends a model of round {base.round} of `{consent.study}`, and shows signatures for "
                "another round or another model",
                hint="show this to the coordinator's operator and to the other hospitals",
                code="DECLINED_MODEL_MISMATCH",
            )

    def _checked(self, consent: Consent, opened: OpenedEntry, digest: str, interrupt: Interrupt) -> None:
        agreed = self._agreed(consent, opened.round)
        shown = self._shown(agreed.study, agreed.revision, agreed.round, interrupt)
        if shown.model and shown.model != digest:
            raise BadData(
                f"the coordinator shows model {shown.model[:12]}… as that of round {opened.round} of `{opened.study}`, "
                f"and sends {digest[:12]}…",
                code="DECLINED_MODEL_MISMATCH",
            )
        found = self._look(consent, agreed, shown, digest, SAMPLE)
        self._kept(agreed).save(shown)
        self._note(opened, digest, found)
        if found.result == OTHER:
            raise NotPermitted(
                f"the model of round {opened.round} of `{opened.study}` is not what the sum of its updates gives: "
                f"{found.why}",
                hint="show this to the coordinator's operator and to the other hospitals; this site goes on with a new "
                "revision alone, which somebody approves",
                code="DECLINED_MODEL_MISMATCH",
            )
        log.info(
            "the sum of round %d of `%s` is checked: %d of %d blocks", opened.round, opened.study,
            len(found.looked_at), found.of,
        )  # fmt: skip

    def _look(
        self, consent: Consent, agreed: AgreedEntry, shown: SumEvidence, digest: str, blocks: int | None,
        kept: Blockwise | None = None,
    ) -> Checked:  # fmt: skip
        """Look at so many blocks, in what is kept or as the coordinator shows them."""
        sum_ = terms.sum_of(consent, agreed, *(self._model(consent.study, one) for one in (agreed.base, digest)))
        if sum_.averages and (sum_.base is None or sum_.model is None):
            raise BadData(
                f"the models of round {agreed.round} of `{consent.study}` are not kept here any more",
                hint="this site keeps those of the last round that it checked",
            )
        looked_at = drawn(sum_.layout, None if sum_.layout.blocks <= WHOLE else blocks)
        if kept is not None:
            return check(sum_, shown, kept, looked_at)
        with self.session.use() as connection:
            return check(sum_, shown, connection, looked_at)

    def _keep(self, consent: Consent, agreed: AgreedEntry, shown: SumEvidence) -> KeptVectors:
        """Fetch every vector of a sum whole, and keep it with the models."""
        sum_ = terms.sum_of(consent, agreed, *(self._model(consent.study, one) for one in (agreed.base, shown.model)))
        sites = [one.site for one in evidence_of(sum_, shown).submissions]
        kept = self._kept(agreed)
        kept.save(shown)
        for name, path in ((BASE, sum_.base), (MODEL, sum_.model)):
            kept.save_model(name, path)
        for site in sites:
            with self.session.use() as connection:
                wanted = BlocksWanted(agreed.study, agreed.revision, agreed.round, site, ())
                kept.save_vector(sum_.layout, connection, wanted)
        return KeptVectors(kept, sum_.layout)

    def _kept(self, agreed: AgreedEntry) -> KeptSum:
        return KeptSum(self.sums / name_of(agreed.study, agreed.revision, agreed.round))

    def _agreed(self, consent: Consent, round_: int) -> AgreedEntry:
        for entry, _ in self.ledger.pledged.sets():
            if (entry.study_sha256, entry.round) == (consent.study_digest, round_):
                return entry
        raise UsageProblem(f"this site signed no set of round {round_} of `{consent.study}`")

    def _shown(self, study: str, revision: int, round_: int, interrupt: Interrupt) -> SumEvidence:
        for tries, wait_s in enumerate(backoff(), 1):
            interrupt.check()
            times_connected = self.session.times_connected
            try:
                with self.session.use() as connection:
                    return connection.evidence(study, revision, round_)
            except (Unavailable, TryAgain) as error:
                if tries >= TRIES_IN_TROUBLE:
                    raise
                log.warning("%s; asking again in %.1f s", error.message, wait_s)
                self.session.pause(wait_s, times_connected, interrupt)
        raise AssertionError("backoff never ends")

    def _model(self, study: str, digest: str) -> Path | None:
        if not digest:
            return None
        path = self.attempts.model(study, digest)
        try:
            with TensorFile(path) as file:
                return path if file.manifest().digest() == digest else None
        except BadData:
            return None  # gone, or torn by a loss of power

    def _note(self, opened: OpenedEntry, model: str, found: Checked) -> None:
        self.ledger.append(SumCheckedEntry(
            study=opened.study, revision=opened.revision, study_sha256=opened.study_sha256, round=opened.round,
            attempt=opened.attempt, context=opened.context, chosen=opened.chosen, model=model,
            looked_at=found.looked_at, of=found.of, result=found.result,
        ))  # fmt: skip
        self.ledger.sign()
