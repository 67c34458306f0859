"""Log-ins with a provider of OpenID Connect: authorization code flow, PKCE, state, nonce, its signed ID token.

The provider says who somebody is; which of them may look stands in a file of the operator's, and nobody may whom that
does not name. Each connection to the provider is TLS with its certificate verified, and follows no redirect. Nothing
here is kept on disk: a log-in under way is in the cookie of the browser that began it, sealed with a key of this
process. So however many strangers begin one, nobody's is pushed out.

OpenID Connect Core 1.0 (3.1.3.7), RFC 7636 (PKCE), RFC 9207 (the answer's issuer), RFC 9700 (current practice).
"""

import hashlib
import hmac
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Annotated, Any

from authlib.integrations.base_client import OAuthError
from authlib.integrations.requests_client import OAuth2Session
from cryptography.fernet import Fernet, InvalidToken
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet
from pydantic import Field, model_validator
from requests import RequestException

from wardround.errors import BadData, NotPermitted, Unavailable
from wardround.local.rate_limit import RateLimitedLog
from wardround.records.schema import Strict, check, read_toml
from wardround.signing.certificates import refuse_readable
from wardround.terminal import escaped
from wardround.web.passwords import User

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519")
SCOPES = ("openid", "profile")
TIMEOUT_S = 10
LEEWAY_S = 60  # by which the provider's clock may be another
UNDER_WAY_S = 600  # in which somebody must have logged in there
MOST_SPENT = 1000  # log-ins that are remembered as over; the provider takes no code twice either
KEYS_S = 60  # at least, between two looks at the provider's keys
LONGEST_NAME = 64
AGAIN = "begin again at the log-in page"
Text = Annotated[str, Field(min_length=1, max_length=500)]
log = logging.getLogger(__name__)


class LookTable(Strict):
    subjects: tuple[Text, ...] = ()
    groups: tuple[Text, ...] = ()

    @model_validator(mode="after")
    def _somebody(self) -> "LookTable":
        if not self.subjects and not self.groups:
            raise ValueError("names nobody: give `subjects` or `groups`, of the provider's own words")
        return self


class Settings(Strict):
    """The operator's file.

    Attributes:
        issuer: the provider's name, which is where its configuration is found.
        client_secret_file: beside this file, unless it is absolute; "" for a client without a secret.
        ca_file: further authorities of the provider's certificate, likewise; "" for the system's.
        look: who may look, by the `sub` and the groups in the provider's ID token.
    """

    issuer: Annotated[str, Field(pattern=r"^https://[^\s?#]+$", max_length=500)]
    client_id: Text
    client_secret_file: str = ""
    ca_file: str = ""
    scopes: tuple[Text, ...] = SCOPES
    name_claim: Text = "preferred_username"
    groups_claim: Text = "groups"
    look: LookTable


@dataclass(frozen=True)
class UnderWay:
    """A log-in that somebody began, as the cookie of that browser has it."""

    state: str
    nonce: str
    verifier: str


class Provider:
    """One provider, for one page. Safe to use from several threads.

    Args:
        path: of the operator's file.
        redirect: where the provider sends the browser back, by our own origin.

    Raises:
        BadData: the file is not one of ours, or names files that are not there.
        NotPermitted: others than its owner may read the client's secret.
    """

    def __init__(self, path: Path, redirect: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = check(Settings, read_toml(path), str(path))
        self._redirect = redirect
        self._clock = clock
        self._log = RateLimitedLog(log)
        self._lock = threading.Lock()
        self._seal, self._spent = Fernet(Fernet.generate_key()), dict[str, None]()
        self._known: dict[str, Any] | None = None
        self._keys: KeySet | None = None
        self._looked = 0.0
        self._ca = _beside(path, self.settings.ca_file) if self.settings.ca_file else None
        secret = self.settings.client_secret_file
        self._secret = _secret(_beside(path, secret)) if secret else None

    @property
    def name(self) -> str:
        """What people are shown of it: its host."""
        return self.settings.issuer.removeprefix("https://").partition("/")[0]

    def begin(self) -> tuple[str, str]:
        """A new log-in: the address at the provider that the browser goes to, and what its cookie must say.

        Raises:
            Unavailable: the provider cannot be reached. BadData: what it says of itself cannot be.
        """
        found = self._discovered()
        began = UnderWay(*(secrets.token_urlsafe(32) for _ in range(3)))
        with self._session() as session:
            address, _ = session.create_authorization_url(
                found["authorization_endpoint"], state=began.state, code_verifier=began.verifier, nonce=began.nonce
            )
        sealed = self._seal.encrypt_at_time(json.dumps(astuple(began)).encode(), int(self._clock()))
        return str(address), sealed.decode()

    def end(self, answer: Mapping[str, str], browser: str) -> User:
        """Who logged in, from the provider's ``answer`` through the browser whose cookie says ``browser``.

        Raises:
            NotPermitted: nobody began this in that browser, or it was used already or is too old; the provider refused;
                its token is not for us or of this log-in; or whoever it names may not look.
            Unavailable: the provider cannot be reached. BadData: what it says of itself cannot be.
        """
        began = self._take(answer.get("state", ""), browser)
        if answer.get("iss", self.settings.issuer) != self.settings.issuer:
            raise NotPermitted("the answer is of another provider", hint=AGAIN)
        if "error" in answer or not answer.get("code"):
            self._log.warning("the provider let nobody in: %s", escaped(answer.get("error", "no code"))[:LONGEST_NAME])
            raise NotPermitted("the provider let nobody in", hint=AGAIN)
        claims = self._claims(self._token(answer["code"], began.verifier), began.nonce)
        subject, groups = str(claims["sub"]), claims.get(self.settings.groups_claim, [])
        member = {str(group) for group in groups} if isinstance(groups, list) else set()
        look = self.settings.look
        name = escaped(str(claims.get(self.settings.name_claim) or subject))[:LONGEST_NAME]
        if subject not in look.subjects and not member & set(look.groups):
            self._log.warning("`%s` is known to the provider and may not look", name)
            raise NotPermitted(
                "you are known to the provider, and may not look here",
                hint="the operator names subjects or groups in the file of the provider",
            )
        return User(name=name, may="look", salt="", secret=_hash(subject))

    def _take(self, state: str, browser: str) -> UnderWay:
        """The log-in that this browser began with this state, which is over by that."""
        nobody = NotPermitted("nobody began this log-in in this browser, or it is over", hint=AGAIN)
        try:
            text = self._seal.decrypt_at_time(browser.encode(), UNDER_WAY_S - 1, int(self._clock()))
        except InvalidToken:
            raise nobody from None
        began = UnderWay(*json.loads(text))
        if not hmac.compare_digest(began.state.encode(), state.encode()):
            raise nobody
        with self._lock:
            if state in self._spent:
                raise nobody
            if len(self._spent) >= MOST_SPENT:
                del self._spent[next(iter(self._spent))]
            self._spent[state] = None
        return began

    def _token(self, code: str, verifier: str) -> str:
        with self._session() as session:
            try:
                answer = session.fetch_token(
                    self._discovered()["token_endpoint"], grant_type="authorization_code", code=code,
                    code_verifier=verifier, timeout=TIMEOUT_S,
                )  # fmt: skip
            except RequestException as error:
                raise _unreachable(error) from None
            except (OAuthError, ValueError) as error:
                self._log.warning("the provider gives no token: %s", escaped(str(error))[:200])
                raise NotPermitted("the provider gives no token for this log-in", hint=AGAIN) from None
        return str(answer.get("id_token", ""))

    def _claims(self, token: str, nonce: str) -> dict[str, Any]:
        """What a token says, signed by the provider, for us, now, and of this log-in."""
        ours = self.settings.client_id
        try:
            claims = self._decoded(token)
            jwt.JWTClaimsRegistry(
                leeway=LEEWAY_S, iss={"essential": True, "value": self.settings.issuer},
                aud={"essential": True, "value": ours}, exp={"essential": True}, iat={"essential": True},
                sub={"essential": True}, nonce={"essential": True, "value": nonce},
            ).validate(claims)  # fmt: skip
        except (JoseError, ValueError, TypeError, KeyError) as error:
            self._log.warning("a token of the provider is refused: %s", escaped(str(error))[:200])
            raise NotPermitted("the provider's token is not one for this log-in", hint=AGAIN) from None
        audience = claims["aud"] if isinstance(claims["aud"], list) else [claims["aud"]]
        if claims.get("azp", ours) != ours or (len(audience) > 1 and "azp" not in claims):
            raise NotPermitted("the provider's token is for another client", hint=AGAIN)
        return claims

    def _decoded(self, token: str) -> dict[str, Any]:
        """With the provider's keys, looked at again where they were others before."""
        keys = self._provider_keys(again=False)
        try:
            return jwt.decode(token, keys, algorithms=list(ALGORITHMS)).claims
        except (JoseError, ValueError):
            if (newer := self._provider_keys(again=True)) is keys:
                raise
            return jwt.decode(token, newer, algorithms=list(ALGORITHMS)).claims

    def _provider_keys(self, *, again: bool) -> KeySet:
        with self._lock:
            keys, since = self._keys, self._clock() - self._looked
        if keys is not None and (not again or since < KEYS_S):
            return keys
        try:
            keys = KeySet.import_key_set({"keys": self._get(self._discovered()["jwks_uri"])["keys"]})
        except (JoseError, ValueError, TypeError, KeyError) as error:
            raise BadData(f"the provider's keys cannot be read: {escaped(str(error))[:200]}") from None
        with self._lock:
            self._keys, self._looked = keys, self._clock()
        return keys

    def _discovered(self) -> dict[str, Any]:
        """What the provider says of itself. Raises Unavailable, BadData."""
        if self._known is not None:
            return self._known
        issuer = self.settings.issuer
        found = self._get(f"{issuer.rstrip('/')}/.well-known/openid-configuration")
        if found.get("issuer") != issuer:
            raise BadData(f"the provider calls itself {escaped(str(found.get('issuer')))[:200]!r}, not {issuer!r}")
        for name in ("authorization_endpoint", "token_endpoint", "jwks_uri"):
            if not str(found.get(name, "")).startswith("https://"):
                raise BadData(f"the provider's `{name}` is no https:// address")
        self._known = found
        return found

    def _get(self, address: str) -> dict[str, Any]:
        with self._session() as session:
            try:
                answer = session.get(address, timeout=TIMEOUT_S, withhold_token=True)
                answer.raise_for_status()
                found = answer.json()
            except RequestException as error:
                raise _unreachable(error) from None
        if not isinstance(found, dict):
            raise BadData(f"{address} gives no JSON object")
        return found

    def _session(self) -> OAuth2Session:
        """Of one exchange. It reads no file of passwords, follows no redirect, and always verifies the provider."""
        session = OAuth2Session(
            self.settings.client_id, self._secret, scope=" ".join(self.settings.scopes), redirect_uri=self._redirect,
            code_challenge_method="S256",
            token_endpoint_auth_method="client_secret_basic" if self._secret else "none",
        )  # fmt: skip
        session.trust_env, session.max_redirects = False, 0
        session.verify = str(self._ca) if self._ca is not None else True
        return session


def _unreachable(error: RequestException) -> Unavailable:
    return Unavailable(f"the provider cannot be asked: {escaped(str(error))[:300]}")


def _beside(path: Path, name: str) -> Path:
    """Raises BadData: there is no such file."""
    found = path.parent / name
    if not found.is_file():
        raise BadData(f"{path}: names {found}, and there is no such file")
    return found


def _secret(path: Path) -> str:
    """Raises NotPermitted: others may read it."""
    refuse_readable(path)
    return path.read_text(encoding="utf-8").strip()


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
