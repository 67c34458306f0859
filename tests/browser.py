"""What a browser does with our pages, without one: it keeps cookies, says where a form comes from, follows nothing."""

import html
import re

from starlette.testclient import TestClient

from wardround.web.guard import Guard

ORIGIN = "http://127.0.0.1:8080"
PASSWORD = "four words that rhyme"
CHEAP = 2**10  # scrypt's N where nothing is kept


class Browser:
    """One browser, at one of our pages."""

    def __init__(self, app: Guard, origin: str = ORIGIN) -> None:
        self.client = TestClient(app, base_url=origin, follow_redirects=False)
        self.origin = origin

    def get(self, path: str, status: int = 200) -> str:
        """The page's text, as a person reads it."""
        answer = self.client.get(path)
        assert answer.status_code == status, (answer.status_code, answer.text)
        return html.unescape(answer.text)

    def post(self, path: str, /, **fields: str) -> tuple[int, str]:
        """The status, and where it leads or what it says."""
        answer = self.client.post(path, data=fields, headers={"Origin": self.origin})
        return answer.status_code, html.unescape(answer.headers.get("location") or answer.text)

    def log_in(self, name: str = "dana", password: str = PASSWORD) -> tuple[int, str]:
        return self.post("/login", name=name, password=password)

    def fields(self, page: str, action: str) -> dict[str, str]:
        """The hidden fields of the form of a page that leads to ``action``."""
        forms = re.findall(rf'<form method="\w+" action="{re.escape(action)}".*?</form>', page, re.DOTALL)
        assert len(forms) == 1, (action, len(forms))
        return dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', forms[0]))

    def press(self, page: str, action: str, **others: str) -> tuple[int, str]:
        """Send the form of ``page`` that leads to ``action``."""
        return self.post(action, **(self.fields(page, action) | others))
