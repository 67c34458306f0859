"""A provider of OpenID Connect on loopback, that holds its clients to the code flow with PKCE, and may cheat."""

import base64
import datetime
import hashlib
import ipaddress
import json
import secrets
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from joserfc import jwt
from joserfc.jwk import ECKey

CLIENT, SECRET = "wardround", "a secret of the client"


@dataclass
class Cheating:
    """What the provider does otherwise than it should. ``claims``: other ones; None takes one out."""

    claims: dict[str, Any] = field(default_factory=dict)
    make: Callable[[dict[str, Any]], str] | None = None  # a token of such claims, in the place of signing
    key: Any = None  # with which it signs
    metadata: dict[str, Any] = field(default_factory=dict)
    redirect: str = ""  # where the token endpoint leads


class IdentityProvider:
    """``trusted`` is the file of the authority of its certificate."""

    def __init__(self, folder: Path) -> None:
        self.trusted = folder / "provider.pem"
        self.key = ECKey.generate_key("P-256", {"kid": "first"})
        self.cheating = Cheating()
        self.codes: dict[str, dict[str, str]] = {}
        self.asked: list[str] = []
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                provider.asked.append(self.path)
                self._say(*provider.get(self.path))

            def do_POST(self) -> None:
                provider.asked.append(self.path)
                form = self.rfile.read(int(self.headers["Content-Length"])).decode()
                if provider.cheating.redirect:
                    self.send_response(307)
                    self.send_header("Location", provider.cheating.redirect)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                self._say(*provider.token(dict(parse_qsl(form)), self.headers.get("Authorization", "")))

            def _say(self, status: int, document: dict[str, Any]) -> None:
                body = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                pass  # a client that does not trust us goes away in the middle of the handshake

        self.server = Server(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(_certificate(self.trusted))
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True, do_handshake_on_connect=False)
        self.issuer = f"https://127.0.0.1:{self.server.server_port}/realm"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()

    def settings(self, folder: Path, look: str = 'groups = ["operators"]', ca: str = "provider.pem") -> Path:
        """The operator's file."""
        secret = folder / "secret"
        secret.write_text(f"{SECRET}\n")
        secret.chmod(0o600)
        path = folder / "oidc.toml"
        trusted = f'ca_file = "{ca}"\n' if ca else ""
        path.write_text(
            f'issuer = "{self.issuer}"\nclient_id = "{CLIENT}"\nclient_secret_file = "secret"\n{trusted}\n'
            f"[look]\n{look}\n"
        )
        return path

    def log_in(self, address: str, subject: str = "1234") -> dict[str, str]:
        """What somebody who logs in at ``address`` brings back: the answer's parameters."""
        parts = urlsplit(address)
        asked = {name: values[0] for name, values in parse_qs(parts.query).items()}
        assert f"{parts.scheme}://{parts.netloc}{parts.path}" == f"{self.issuer}/authorize"
        assert (asked["response_type"], asked["code_challenge_method"]) == ("code", "S256")
        code = secrets.token_urlsafe(16)
        self.codes[code] = asked | {"subject": subject}
        return {"code": code, "state": asked["state"], "iss": self.issuer}

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        if path == "/realm/.well-known/openid-configuration":
            names = {"authorization_endpoint": "authorize", "token_endpoint": "token", "jwks_uri": "keys"}
            found = {"issuer": self.issuer} | {name: f"{self.issuer}/{end}" for name, end in names.items()}
            return 200, found | self.cheating.metadata
        if path == "/realm/keys":
            return 200, {"keys": [self.key.as_dict(private=False)]}
        return 404, {}

    def token(self, form: dict[str, str], authorization: str) -> tuple[int, dict[str, Any]]:
        """Only for the right client, a code of its own that was not used, and the verifier of the code's challenge."""
        asked = self.codes.pop(form.get("code", ""), None)
        basic = base64.b64encode(f"{CLIENT}:{SECRET}".encode()).decode()
        challenge = base64.urlsafe_b64encode(hashlib.sha256(form.get("code_verifier", "").encode()).digest())
        if (
            asked is None
            or authorization != f"Basic {basic}"
            or asked["code_challenge"] != challenge.rstrip(b"=").decode()
            or asked["redirect_uri"] != form.get("redirect_uri")
        ):
            return 400, {"error": "invalid_grant"}
        now = int(time.time())
        claims: dict[str, Any] = {
            "iss": self.issuer, "aud": CLIENT, "sub": asked["subject"], "nonce": asked["nonce"], "iat": now,
            "exp": now + 300, "preferred_username": "dana", "groups": ["operators"],
        }  # fmt: skip
        claims = {name: value for name, value in (claims | self.cheating.claims).items() if value is not None}
        if self.cheating.make is not None:
            token = self.cheating.make(claims)
        else:
            header = {"alg": "ES256", "kid": self.key.kid or ""}
            token = jwt.encode(header, claims, self.cheating.key or self.key)
        return 200, {"access_token": "of no use here", "token_type": "Bearer", "id_token": token}


def _certificate(path: Path) -> Path:
    """A self-signed certificate into ``path``; where it lies with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    now, name = datetime.datetime.now(datetime.UTC), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "provider")])
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1)).add_extension(here, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True).sign(key, hashes.SHA256())
    )  # fmt: skip
    pem = made.public_bytes(serialization.Encoding.PEM)
    path.write_bytes(pem)
    with_key = path.with_name("provider-with-key.pem")
    form, private = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    with_key.write_bytes(pem + key.private_bytes(form, private, serialization.NoEncryption()))
    return with_key
