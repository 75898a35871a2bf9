"""The pages for browsers: who gets them, what they are made of, and what browsers are told about them."""

from __future__ import annotations

import pathlib
import re
import tomllib

import pytest

import kvrelay.frontend.pages.site as site
from kvrelay.config import RouterOptions
from kvrelay.frontend.http.accept import prefers_html
from tests.frontend.serving import MODEL, fake_backend, http_client, make_app

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"
FOLDER = pathlib.Path(site.__file__).parent / "site"
FILES = sorted(path.name for path in FOLDER.iterdir())
ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (None, False),
        ("", False),
        ("*/*", False),
        ("application/json", False),
        (BROWSER, True),
        ("text/html", True),
        ("TEXT/HTML", True),
        ("application/json, text/html", True),
        ("application/json, text/html;q=0.5", False),
        ("text/html;q=0", False),
        ("text/html;q=wrong", False),
        ("text/html; level=1; q=0.7, application/json; q=0.6", True),
        ("application/xhtml+xml", True),
        (",;,q=1", False),
    ],
)
def test_who_is_a_browser(accept: str | None, expected: bool) -> None:
    assert prefers_html(None if accept is None else accept.encode()) is expected


async def test_browsers_get_the_dashboard_and_programs_json() -> None:
    async with http_client(make_app(fake_backend())) as client:
        page = await client.get("/", headers={"accept": BROWSER})
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert page.headers["vary"] == "accept"
        for accept in ("*/*", "application/json"):
            assert (await client.get("/", headers={"accept": accept})).json()["model"] == MODEL


@pytest.mark.parametrize("name", [name for name in FILES if not name.endswith(".html")])
async def test_every_file_is_served_with_its_type_and_not_twice(name: str) -> None:
    kinds = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}
    async with http_client(make_app(fake_backend())) as client:
        answer = await client.get(f"/assets/{name}")
        assert answer.headers["content-type"] == kinds[name.rpartition(".")[2]]
        assert answer.content == (FOLDER / name).read_bytes()
        assert answer.headers["x-content-type-options"] == "nosniff"
        tag = answer.headers["etag"]
        for known in (tag, f'"other", {tag}', f"W/{tag}", "*"):
            again = await client.get(f"/assets/{name}", headers={"if-none-match": known})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert (await client.get(f"/assets/{name}", headers={"if-none-match": '"other"'})).status_code == 200


async def test_only_the_pages_files_are_served() -> None:
    async with http_client(make_app(fake_backend())) as client:
        for path in ("/assets/", "/assets/index.html", "/assets/none.js", "/assets/..%2Fsite.py", "/assets/%2e%2e/site.py"):
            assert (await client.get(path)).status_code == 404


@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_pages_need_no_key_and_hold_nothing(path: str) -> None:
    options = RouterOptions(api_key="secret", served_model_name="very-private")
    async with http_client(make_app(fake_backend(), options)) as client:
        page = await client.get(path, headers={"accept": BROWSER})
        assert page.status_code == 200
        assert "very-private" not in page.text
        assert (await client.get(path)).status_code == 401
        for asset in re.findall(r'(?:src|href)="(assets/[^"]+)"', page.text):
            assert (await client.get(f"/{asset}")).status_code == 200
        for data in ("/feed", "/cluster", "/requests", "/openapi.json", "/v1/models"):
            assert (await client.get(data, headers={"accept": BROWSER})).status_code == 401


@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_browsers_are_told_to_load_nothing_from_elsewhere(path: str) -> None:
    async with http_client(make_app(fake_backend())) as client:
        page = await client.get(path, headers={"accept": BROWSER})
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "<script>" not in page.text
        assert " style=" not in page.text


@pytest.mark.parametrize("name", FILES)
def test_no_file_names_another_host(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", text) == []


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".js")])
def test_modules_import_only_files_that_exist(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert [each for each in re.findall(r'from "\./([^"]+)"', text) if each not in FILES] == []
    assert "innerHTML" not in text


async def test_under_the_path_of_a_proxy_links_are_relative_to_it() -> None:
    async with http_client(make_app(fake_backend(), RouterOptions(root_path="/llm/a"))) as client:
        page = await client.get("/llm/a", headers={"accept": BROWSER})
        assert '<base href="/llm/a/">' in page.text
        assert (await client.get("/llm/a/assets/app.js")).status_code == 200
    async with http_client(make_app(fake_backend())) as client:
        assert "<base" not in (await client.get("/", headers={"accept": BROWSER})).text


def test_the_wheel_has_the_files() -> None:
    told = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "frontend/pages/site/*" in told["tool"]["setuptools"]["package-data"]["kvrelay"]
