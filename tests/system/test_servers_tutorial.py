"""The tutorial of servers, as it stands: two users at each hospital, a standby, machines that are switched off."""

import html
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import machines
from tools.machines import Machine, Network
from tools.tutorials import Reader

DATABASE = "203.0.113.20"
NAMES = {"fed.example.org": ("203.0.113.11", "203.0.113.12"), "db.example.org": (DATABASE,)}
SERVERS = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
PASSWORD = "the database's"
pytestmark = [
    pytest.mark.system, pytest.mark.chaos, pytest.mark.timeout(1200),
    pytest.mark.skipif(
        machines.missing() and not os.environ.get("CI"),
        reason=f"no machines can be made here: needs root, namespaces, and {', '.join(machines.NEEDED)}",
    ),
    pytest.mark.skipif(
        not (SERVERS and shutil.which("openssl")) and not os.environ.get("CI"),
        reason="no PostgreSQL server with TLS can be had here: needs postgresql and openssl",
    ),
]  # fmt: skip

# What a browser does: log in with the form's token, and read a page.
LOOK = """
import re, sys, urllib.parse, urllib.request
from http.cookiejar import CookieJar
open_ = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar())).open
origin, user, password, path = sys.argv[1:]
form = open_(origin + "/login").read().decode()
fields = dict(re.findall(r'<input type="hidden" name="(\\w+)" value="([^"]*)">', form))
sent = urllib.parse.urlencode(fields | {"name": user, "password": password}).encode()
open_(urllib.request.Request(origin + "/login", sent, {"Origin": origin}))
print(open_(origin + path).read().decode())
"""


def database(machine: Machine, shared: Path) -> None:
    """The server that the page wants: with TLS, a password, and a database of its own."""
    machine.switch_on()
    folder, port = "/var/tmp/postgres", "5432"
    pages = shared / "db-ca.pem"
    script = f"""
    set -eu
    install -d -o postgres -m 0700 {folder}
    cd {folder}
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 9 -subj /CN=db.example.org \\
      -addext subjectAltName=DNS:db.example.org -keyout server.key -out server.crt 2> /dev/null
    chown postgres server.key; chmod 0600 server.key
    as="setpriv --reuid=postgres --regid=postgres --init-groups"
    $as {SERVERS[0]}/initdb -D {folder}/data -U postgres --auth-local=peer --auth-host=scram-sha-256 --no-sync \\
      --locale=C -E UTF8 > /dev/null
    install -d -o postgres /run/postgresql
    $as {SERVERS[0]}/pg_ctl -D {folder}/data -w -l {folder}/log -o "-c listen_addresses={DATABASE} -p {port} \\
      -c ssl=on -c ssl_cert_file={folder}/server.crt -c ssl_key_file={folder}/server.key \\
      -c unix_socket_directories=/run/postgresql" start > /dev/null
    $as psql -h /run/postgresql -q -c "CREATE ROLE wardround LOGIN PASSWORD '{PASSWORD.replace("'", "''")}'" \\
      -c "CREATE DATABASE wardround OWNER wardround ENCODING 'UTF8' TEMPLATE template0"
    echo "host all all all scram-sha-256" >> {folder}/data/pg_hba.conf
    $as psql -h /run/postgresql -q -c "SELECT pg_reload_conf()" > /dev/null
    """
    machine.run("sh", "-c", script)
    pages.write_bytes((machine.folder / "var/tmp/postgres/server.crt").read_bytes())
    (shared / "db-password").write_text(PASSWORD + "\n")


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    shared = tmp_path / "shared" / "wardround"
    shared.mkdir(parents=True)
    with Network(tmp_path, NAMES) as network:
        database(network.machine("db"), shared)
        for name, sees in (("fed1", shared), ("fed2", shared), ("st-olav", None), ("charite", None)):
            network.machine(name, sees)
        yield network


def test_following_the_page_a_federation_of_servers_survives_what_it_says(network: Network, tmp_path: Path) -> None:
    fed1, fed2, hospital = (network.machines[name] for name in ("fed1", "fed2", "st-olav"))

    def invitation(home: Path, name: str) -> Path:
        return fed1.folder / "var/tmp" / name  # handed over

    with Reader(tmp_path / "home", open=network.shell, left=network.left, file=invitation) as reader:
        reader.follow("tutorial-servers")
        logs = [(machine.folder / "var/tmp/wardround-coordinator.log").read_text() for machine in (fed1, fed2)]
        assert [log.count("ready 203.0.113.1") for log in logs] == [2, 1]  # each led in turn
        assert "first: finished" not in logs[0].split("standby, waiting")[0]  # the plug was pulled before that
        assert logs[1].rstrip().endswith("leads")  # switched on again, it waits
        page = fed1.run(sys.executable, "-c", LOOK, "http://127.0.0.1:8080", "dana", "four words that rhyme", "/")
        assert re.search(r"first.*finished", html.unescape(page), re.DOTALL)
        running = "ps -ww -e -o user:20,args | grep '[s]ite-agent run' | cut -d' ' -f1"
        assert set(hospital.run("sh", "-c", running).split()) == {"wardround", "wardround-trainer"}
    patients = (hospital.folder / "srv/wardround/tables/new.csv").read_text().splitlines()
    predicted = (hospital.folder / "srv/wardround/results/predictions.csv").read_text().splitlines()
    assert len(predicted) == len(patients)  # by the exported model, in plain PyTorch
