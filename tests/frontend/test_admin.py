"""POST /admin/drain and /admin/role, and the commands that use them."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from kvrelay.cli import drain
from kvrelay.cli import main as cli
from kvrelay.config import RouterOptions
from kvrelay.errors import ConfigError, ConflictError, UnavailableError
from kvrelay.frontend.fake_backend import FakeBackend
from kvrelay.router.backend import DrainOrder
from kvrelay.states import Role
from tests.frontend.serving import fake_backend, http_client, make_app, running_server

FIRST, SECOND, OTHER = "decode-1111aaaa", "decode-1112bbbb", "prefill-3333cccc"


def entry(worker_id: str, *, pid: int, state: str = "ready", running: int = 0) -> dict[str, Any]:
    role = worker_id.partition("-")[0]
    counts = {"running": running, "waiting": 0, "transferring": 0, "swapped": 0}
    return {"id": worker_id, "role": role, "state": state, "host": "here", "pid": pid, **counts}


class Draining(FakeBackend):
    """Its workers leave when they have been looked at a few times, and come back if they were told a role."""

    def __init__(self) -> None:
        super().__init__(eos_token_id=2, vocab_size=100)
        self.workers = {FIRST: Role.DECODE, SECOND: Role.DECODE, OTHER: Role.PREFILL}
        self.shown = [entry(FIRST, pid=1), entry(SECOND, pid=2), entry(OTHER, pid=3)]
        self.warning = ""
        self._looks = 0

    def drain(self, worker_id: str, role: Role | None = None) -> DrainOrder:
        order = super().drain(worker_id, role)
        return DrainOrder(worker=order.worker, role=order.role, next_role=role, warning=self.warning)

    def cluster(self) -> dict[str, Any]:
        if self.drained:
            self._go_on(*self.drained[0])
        return {"workers": list(self.shown)}

    def _go_on(self, worker_id: str, role: Role | None) -> None:
        self._looks += 1
        (gone,) = [each for each in self.shown if each["id"] == worker_id] or [None]
        if gone is not None and self._looks == 1:
            gone.update(state="draining", running=2)
        elif gone is not None:
            self.shown.remove(gone)
        elif role is not None and self._looks == 3:
            self.shown.append(entry(f"{role.value}-9999", pid=1, state="starting"))
        elif role is not None and self._looks == 4:
            self.shown[-1]["state"] = "ready"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "_LOOK_EVERY_S", 0.001)


# HTTP


async def test_a_worker_is_told_and_the_answer_says_what() -> None:
    backend = Draining()
    backend.warning = "it is the last decode worker"
    async with http_client(make_app(backend)) as client:
        answer = await client.post("/admin/drain", json={"worker": FIRST})
        assert (answer.status_code, answer.json()) == (
            200,
            {"worker": FIRST, "role": "decode", "next_role": None, "warning": "it is the last decode worker"},
        )
        answer = await client.post("/admin/role", json={"worker": OTHER, "role": "whole"})
        assert answer.json()["next_role"] == "whole"
    assert backend.drained == [(FIRST, None), (OTHER, Role.WHOLE)]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/admin/drain", {"worker": "decode-0"}, 404, "worker"),
        ("/admin/drain", {}, 400, "worker"),
        ("/admin/drain", {"worker": 5}, 400, "worker"),
        ("/admin/drain", {"worker": FIRST, "force": True}, 400, "force"),
        ("/admin/role", {"worker": FIRST}, 400, "role"),
        ("/admin/role", {"worker": FIRST, "role": "encode"}, 400, "role"),
        ("/admin/role", {"worker": FIRST, "role": "king"}, 400, "role"),
        ("/admin/role", [1], 400, None),
    ],
)
async def test_what_makes_no_sense_is_refused_in_openais_shape(path: str, body: Any, status: int, param: str | None) -> None:
    backend = Draining()
    async with http_client(make_app(backend)) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["message"]
    assert error["param"] == param
    assert backend.drained == []


@pytest.mark.parametrize(
    ("error", "status"),
    [(ConflictError("draining already", param="worker"), 409), (UnavailableError("cannot be reached"), 503)],
)
async def test_what_the_router_refuses_has_its_status(error: ConflictError | UnavailableError, status: int) -> None:
    backend = fake_backend()

    def refuse(worker_id: str, role: Role | None = None) -> DrainOrder:
        raise error

    backend.drain = refuse  # type: ignore[method-assign]
    async with http_client(make_app(backend)) as client:
        answer = await client.post("/admin/drain", json={"worker": FIRST})
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == error.kind


async def test_the_key_of_v1_is_needed_here_too() -> None:
    backend = Draining()
    async with http_client(make_app(backend, RouterOptions(api_key="secret"))) as client:
        for path, body in (("/admin/drain", {"worker": FIRST}), ("/admin/role", {"worker": FIRST, "role": "whole"})):
            assert (await client.post(path, json=body)).status_code == 401
            assert (await client.post(path, json=body, headers={"authorization": "Bearer wrong"})).status_code == 401
        assert backend.drained == []
        answer = await client.post("/admin/drain", json={"worker": FIRST}, headers={"authorization": "Bearer secret"})
        assert answer.status_code == 200
        assert (await client.get("/admin/drain", headers={"authorization": "Bearer secret"})).status_code == 405


ORDERS: list[tuple[str, dict[str, Any]]] = [
    ("/admin/drain", {"worker": FIRST}),
    ("/admin/role", {"worker": FIRST, "role": "whole"}),
    ("/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": "/adapters/sql"}),
    ("/v1/unload_lora_adapter", {"lora_name": "sql"}),
]


@pytest.fixture
def admin_keys(tmp_path: pathlib.Path) -> str:
    file = tmp_path / "admin"
    file.write_text("operator\n", encoding="utf-8")
    file.chmod(0o600)
    return str(file)


async def statuses(options: RouterOptions, key: str) -> list[int]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with http_client(make_app(Draining(), options)) as client:
        return [(await client.post(path, json=body, headers=headers)).status_code for path, body in ORDERS]


async def test_orders_need_an_admin_key_where_there_are_any(admin_keys: str) -> None:
    both = RouterOptions(api_key="client", admin_key_file=admin_keys)
    alone = RouterOptions(admin_key_file=admin_keys)
    assert await statuses(RouterOptions(), "") == [200] * 4
    for options in (both, alone):
        assert await statuses(options, "operator") == [200] * 4
        assert await statuses(options, "") == await statuses(options, "wrong") == [401] * 4
    assert await statuses(both, "client") == [403] * 4


async def test_an_api_key_lets_no_worker_read_a_folder() -> None:
    assert await statuses(RouterOptions(api_key="client"), "client") == [200, 200, 403, 403]


async def test_a_refusal_says_what_is_needed_and_admin_keys_open_the_rest(admin_keys: str) -> None:
    async with http_client(make_app(Draining(), RouterOptions(api_key="client", admin_key_file=admin_keys))) as client:
        refused = await client.post("/v1/load_lora_adapter", json=ORDERS[2][1], headers={"authorization": "Bearer client"})
        assert refused.json()["error"]["type"] == "permission_error"
        assert "admin key (--admin-key-file)" in refused.json()["error"]["message"]
        assert (await client.get("/v1/models", headers={"authorization": "Bearer operator"})).status_code == 200
    async with http_client(make_app(Draining(), RouterOptions(admin_key_file=admin_keys))) as client:
        assert (await client.get("/v1/models")).status_code == 200  # orders alone need a key here


# The commands


def test_drain_waits_until_the_worker_has_left(capsys: pytest.CaptureFixture[str]) -> None:
    backend = Draining()
    backend.warning = "it is the last decode worker"
    with running_server(make_app(backend, RouterOptions(api_key="secret"))) as url:
        assert cli.main(["drain", "decode-1111", "--url", url, "--api-key", "secret"]) == 0
    said = capsys.readouterr()
    assert said.out == f"{FIRST} has left\n"
    assert said.err == f"warning: it is the last decode worker\n{FIRST} is draining: 2 running\n"
    assert backend.drained == [(FIRST, None)]


def test_role_waits_until_the_same_process_is_ready_as_another_worker(capsys: pytest.CaptureFixture[str]) -> None:
    backend = Draining()
    with running_server(make_app(backend)) as url:
        assert cli.main(["role", FIRST, "prefill", "--url", url]) == 0
    assert capsys.readouterr().out == f"{FIRST} is back as prefill-9999\n"
    assert backend.drained == [(FIRST, Role.PREFILL)]


def test_nobody_waits_with_no_wait(capsys: pytest.CaptureFixture[str]) -> None:
    backend = Draining()
    with running_server(make_app(backend)) as url:
        assert cli.main(["drain", FIRST, "--url", url, "--no-wait"]) == 0
        assert FIRST in [shown["id"] for shown in backend.shown]
    assert capsys.readouterr().out == f"{FIRST} drains\n"


def test_a_worker_that_does_not_leave_in_time_is_an_error() -> None:
    backend = Draining()
    backend._go_on = lambda worker_id, role: None  # type: ignore[method-assign]
    with running_server(make_app(backend)) as url, pytest.raises(UnavailableError, match="it goes on draining"):
        drain.run([FIRST, "--url", url, "--timeout", "0.01"])


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("decode-111", f"is the beginning of several workers: {FIRST}, {SECOND}"),
        ("whole", f"no worker's id begins with 'whole'; there are: {FIRST}, {SECOND}, {OTHER}"),
    ],
)
def test_a_name_that_fits_none_or_several_is_refused(name: str, complaint: str) -> None:
    backend = Draining()
    with running_server(make_app(backend)) as url, pytest.raises(ConfigError) as raised:
        drain.run([name, "--url", url])
    assert complaint in str(raised.value)
    assert backend.drained == []


def test_a_wrong_key_and_a_server_that_is_not_there_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with running_server(make_app(Draining(), RouterOptions(api_key="secret"))) as url:
        assert cli.main(["drain", FIRST, "--url", url, "--api-key", "other"]) == 2
    assert cli.main(["role", FIRST, "decode", "--url", url]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == "error: wrong API key"
    assert second.startswith(f"error: no server answers at {url}")


def test_a_role_that_does_not_exist_is_refused_before_anybody_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["role", FIRST, "king", "--url", "http://127.0.0.1:1"]) == 2
    assert "invalid choice: 'king'" in capsys.readouterr().err
