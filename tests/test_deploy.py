"""The files in deploy/ are right: schemas accept them, systemd accepts the units, what they refer to is there, and every
`kvrelay ...` command line in them, and in docs/deploy.md, is one that kvrelay itself accepts."""

from __future__ import annotations

import functools
import json
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import resources
from typing import Any

import jsonschema_rs
import kubernetes_validate
import pytest
import yaml

from kvrelay.cli import client, doctor, probe
from kvrelay.cli import main as cli
from kvrelay.config import RouterOptions
from kvrelay.launch import serve as launch
from kvrelay.metrics import Metrics
from kvrelay.planes import cluster_key
from kvrelay.states import WorkerState
from kvrelay.worker import worker

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
BASE = DEPLOY / "kubernetes/base"
GPU = DEPLOY / "kubernetes/gpu"
IMAGES = DEPLOY / "kubernetes/images"
AUTOSCALE = DEPLOY / "kubernetes/autoscale"
AUTOSCALE_IMAGES = DEPLOY / "kubernetes/autoscale-images"
SYSTEMD = DEPLOY / "systemd"
UNITS = sorted(SYSTEMD.glob("*.service"))
KUBERNETES_VERSIONS = ("1.30", "1.37")
# What stands for values that only a running machine knows.
UNKNOWN = {"%i": "1", "%d": "/run/credentials", "$(hostname -i)": "10.0.0.2", "$POD_IP": "10.0.0.2", "$(POD_IP)": "10.0.0.2"}


# Command lines


@pytest.fixture
def dry(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cli.main` parses everything and starts nothing."""
    for module, name in (
        (launch, "serve"),
        (launch, "route"),
        (worker, "run_worker"),
        (cluster_key, "write_new_key"),
        (cluster_key, "load_key"),
        (probe, "load_key"),
    ):
        monkeypatch.setattr(module, name, lambda *arguments, **settings: 0)
    monkeypatch.setattr(probe, "ask", lambda address, timeout_s: WorkerState.READY)
    monkeypatch.setattr(doctor, "examine", lambda environment, port: {})
    monkeypatch.setattr(doctor, "examine_cluster", lambda cluster: {})
    monkeypatch.setattr(client, "connect", _reach)


class ReachedError(Exception):
    """The command line was fine, and the server would have been asked."""


def _reach(url: str, api_key: str) -> None:
    raise ReachedError


def commands_in(text: str) -> Iterator[list[str]]:
    """The command lines inside a shell's words."""
    for part in re.split(r";|&&|\|", text):
        words = shlex.split(part, comments=True)
        if "kvrelay" in words:
            yield words[words.index("kvrelay") :]


def commands_of(words: list[str]) -> Iterator[list[str]]:
    """The kvrelay command lines in a container's command, which may be a shell's."""
    if words[:2] == ["sh", "-c"] or words[:1] == ["CMD-SHELL"]:
        yield from commands_in(words[-1])
    elif words[:1] == ["CMD"]:
        yield from commands_of(words[1:])
    elif pathlib.PurePath(words[0]).name == "kvrelay":
        yield ["kvrelay", *words[1:]]


def fill_in(word: str, values: dict[str, str]) -> str:
    for name, value in {**UNKNOWN, **values}.items():
        word = word.replace(name, value)
    return word


def accept(command: list[str]) -> None:
    """Parsed as kvrelay would; a word that nobody knows fails."""
    unfilled = [word for word in command if "$" in word or "%" in word]
    assert not unfilled, f"values that nobody gives: {unfilled}"
    if command[1] in ("drain", "role"):
        with pytest.raises(ReachedError):
            cli.main(command[1:])
        return
    assert cli.main(command[1:]) == 0, shlex.join(command)


# Kubernetes


@functools.cache
def kustomization(folder: pathlib.Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    return loaded


def base_resources() -> list[dict[str, Any]]:
    return resources_of(BASE)


def resources_of(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Those of the overlay and of what it is laid over, with its components and patches, as kustomize applies them."""
    patched = patched_by(folder, [])
    for component in kustomization(folder).get("components", []):
        patched = patched_by((folder / component).resolve(), patched)
    return patched


def patched_by(folder: pathlib.Path, patched: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for name in kustomization(folder)["resources"]:
        place = (folder / name).resolve()
        patched += resources_of(place) if place.is_dir() else yaml.safe_load_all(place.read_text(encoding="utf-8"))
    for patch in kustomization(folder).get("patches", []):
        kind, name = patch["target"]["kind"], re.compile(patch["target"]["name"])
        targets = [one for one in patched if one["kind"] == kind and name.fullmatch(one["metadata"]["name"])]
        assert targets, "a patch for nobody"
        for one in targets:
            for operation in yaml.safe_load(patch["patch"]):
                apply(one, operation)
    return patched


def apply(resource: Any, operation: dict[str, Any]) -> None:
    """One operation of a JSON patch."""
    *way, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
    place = resource
    for part in way:
        place = place[int(part)] if isinstance(place, list) else place[part]
    if last == "-":
        place.append(operation["value"])
        return
    if operation["op"] == "remove":
        del place[last]
        return
    assert operation["op"] == "add" or last in place, f"nothing to replace at {operation['path']}"
    place[last] = operation["value"]


VARIANTS = {folder.name: folder for folder in (BASE, GPU, IMAGES, AUTOSCALE, AUTOSCALE_IMAGES)}


@pytest.fixture(params=VARIANTS)
def manifests(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return resources_of(VARIANTS[request.param])


def workers(manifests: list[dict[str, Any]]) -> list[str]:
    return sorted(set(pods(manifests)) - {"etcd", "router"})


def pods(manifests: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The pod templates, by component."""
    templates = [one["spec"]["template"] for one in manifests if "template" in one.get("spec", {})]
    return {one["metadata"]["labels"]["app.kubernetes.io/component"]: one["spec"] for one in templates}


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_kubernetes_accepts_the_manifests(manifests: list[dict[str, Any]], version: str) -> None:
    for resource in manifests:
        kubernetes_validate.validate(resource, version, strict=True)


def test_a_wrong_manifest_is_noticed() -> None:
    resource = base_resources()[0]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**resource, "specs": {}}, KUBERNETES_VERSIONS[0], strict=True)


def test_prefill_and_decode_are_separate_and_have_every_probe_and_drain(manifests: list[dict[str, Any]]) -> None:
    assert workers(manifests) in (["decode", "prefill"], ["decode", "encode", "prefill"])
    for component, pod in pods(manifests).items():
        (container,) = pod["containers"]
        assert {"startupProbe", "readinessProbe", "livenessProbe", "resources"} <= set(container), component
        if component != "etcd":
            assert "preStop" in container["lifecycle"]
            assert pod["terminationGracePeriodSeconds"] > 60
    budgets = [one["metadata"]["name"] for one in manifests if one["kind"] == "PodDisruptionBudget"]
    assert sorted(budgets) == sorted(f"kvrelay-{component}" for component in pods(manifests))


def test_pods_meet_the_restricted_profile_of_their_namespace(manifests: list[dict[str, Any]]) -> None:
    for pod in pods(manifests).values():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_what_pods_refer_to_exists(manifests: list[dict[str, Any]]) -> None:
    settings = kustomization(BASE)
    secrets = {entry["name"]: {pathlib.Path(file).name for file in entry["files"]} for entry in settings["secretGenerator"]}
    (config,) = settings["configMapGenerator"]
    keys = {literal.partition("=")[0] for literal in config["literals"]}
    for component, pod in pods(manifests).items():
        volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
        (container,) = pod["containers"]
        for mount in container["volumeMounts"]:
            if component == "etcd":
                continue
            volume = volumes[mount["name"]]
            if "secret" in volume:
                files = {f"{mount['mountPath']}/{name}" for name in secrets[volume["secret"]["secretName"]]}
                assert any(file in word for file in files for word in container["command"]), f"{component} never reads {files}"
        for entry in container["env"] if component != "etcd" else []:
            reference = entry.get("valueFrom", {}).get("configMapKeyRef")
            assert reference is None or (reference["name"] == config["name"] and reference["key"] in keys)


def test_every_selector_finds_its_pods(manifests: list[dict[str, Any]]) -> None:
    components = set(pods(manifests))
    for resource in manifests:
        selector = resource.get("spec", {}).get("selector", {})
        labels = selector.get("matchLabels", selector)
        if labels:
            assert labels["app.kubernetes.io/component"] in components, resource["metadata"]["name"]


def test_commands_in_the_manifests_are_commands(manifests: list[dict[str, Any]], dry: None) -> None:
    (config,) = kustomization(BASE)["configMapGenerator"]
    values = {f"$(KVRELAY_{name.upper()})": value for name, _, value in (line.partition("=") for line in config["literals"])}
    found = []
    for pod in pods(manifests).values():
        (container,) = pod["containers"]
        probes = [container[name].get("exec", {}) for name in ("startupProbe", "readinessProbe", "livenessProbe")]
        for words in [container["command"], *(asked["command"] for asked in probes if asked)]:
            found += [[fill_in(word, values) for word in command] for command in commands_of(words)]
    for command in found:
        accept(command)
    num_workers = len(workers(manifests))
    assert sorted(command[1] for command in found) == ["probe"] * 3 * num_workers + ["router"] + ["worker"] * num_workers
    roles = [word.partition("=")[2] for command in found for word in command if word.startswith("--role=")]
    assert sorted(roles) == workers(manifests)


def test_only_pods_of_the_cluster_reach_workers_and_etcd(manifests: list[dict[str, Any]]) -> None:
    (inside,) = [one for one in manifests if one["metadata"]["name"] == "kvrelay-inside"]
    (expression,) = inside["spec"]["podSelector"]["matchExpressions"]
    assert set(expression["values"]) >= set(pods(manifests)) - {"router"}


@pytest.mark.parametrize("folder", [AUTOSCALE, AUTOSCALE_IMAGES], ids=lambda folder: str(folder.name))
def test_autoscalers_go_by_metrics_that_exist_and_leave_the_number_of_pods_to_themselves(folder: pathlib.Path) -> None:
    manifests, described = resources_of(folder), Metrics().render().decode()
    deployments = {one["metadata"]["name"]: one for one in manifests if one["kind"] == "Deployment"}
    scalers = [one["spec"] for one in manifests if one["kind"] == "HorizontalPodAutoscaler"]
    assert {one["scaleTargetRef"]["name"] for one in scalers} == {f"kvrelay-{role}" for role in ("router", *workers(manifests))}
    (rule,) = yaml.safe_load((AUTOSCALE / "adapter-values.yaml").read_text(encoding="utf-8"))["rules"]["external"]
    for scaler in scalers:
        name = scaler["scaleTargetRef"]["name"]
        assert "replicas" not in deployments[name]["spec"]
        assert scaler["minReplicas"] >= 2
        (metric,) = scaler["metrics"]
        if metric["type"] == "External":
            wanted = metric["external"]["metric"]
            assert wanted["name"] == rule["name"]["as"]
            assert f"# TYPE {wanted['name']} gauge" in described
            assert wanted["name"] in rule["seriesQuery"]
            assert name == f"kvrelay-{wanted['selector']['matchLabels']['role']}"
    (container,) = pods(manifests)["router"]["containers"]
    template = deployments["kvrelay-router"]["spec"]["template"]["metadata"]
    assert template["annotations"]["prometheus.io/port"] in [str(port["containerPort"]) for port in container["ports"]]


def test_http_probes_ask_for_paths_that_need_no_key(manifests: list[dict[str, Any]]) -> None:
    (container,) = pods(manifests)["router"]["containers"]
    asked = {container[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert asked == {"/health", "/metrics"}


def test_grace_periods_outlast_what_they_wait_for() -> None:
    router = pods(base_resources())["router"]
    (container,) = router["containers"]
    (wait,) = [word.partition("=")[2] for word in container["command"] if word.startswith("--shutdown-wait-s")]
    (pause,) = container["lifecycle"]["preStop"]["exec"]["command"][1:]
    assert router["terminationGracePeriodSeconds"] > int(wait) + int(pause) > RouterOptions().shutdown_wait_s


# Compose


@functools.cache
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text(encoding="utf-8"))
    return loaded


@functools.cache
def compose_schema() -> jsonschema_rs.Validator:
    file = resources.files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json"
    return jsonschema_rs.validator_for(json.loads(file.read_text(encoding="utf-8")))


def test_compose_accepts_its_file() -> None:
    assert [error.message for error in compose_schema().iter_errors(compose())] == []


def test_a_wrong_compose_file_is_noticed() -> None:
    wrong = {**compose(), "services": {"router": {"imagine": "kvrelay"}}}
    assert not compose_schema().is_valid(wrong)


def test_what_services_refer_to_exists() -> None:
    loaded = compose()
    for name, service in loaded["services"].items():
        assert "healthcheck" in service, name
        assert set(service.get("secrets", [])) <= set(loaded["secrets"])
        assert set(service["networks"]) <= set(loaded["networks"])
        assert {volume.partition(":")[0] for volume in service["volumes"]} <= set(loaded["volumes"])
        assert set(service.get("depends_on", {})) <= set(loaded["services"])
    build = loaded["services"]["router"]["build"]
    assert (DEPLOY / "compose" / build["context"] / build["dockerfile"]).is_file()


def test_commands_in_the_compose_file_are_commands(dry: None) -> None:
    found = []
    for service in compose()["services"].values():
        for words in (service["command"], service["healthcheck"]["test"]):
            plain = [re.sub(r"\$\{\w+:-(\w+)\}", r"\1", word).replace("$$", "$") for word in words]
            found += [[fill_in(word, {}) for word in command] for command in commands_of(plain)]
    for command in found:
        accept(command)
    assert sorted(command[1] for command in found) == ["probe"] * 4 + ["router", "worker", "worker", "worker"]
    assert compose()["services"]["encode"]["profiles"] == ["images"]  # a text model has nothing to encode


def test_the_image_is_made_of_files_that_exist() -> None:
    lines = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY ") and "--from" not in line]
    names = [name for names in copied for name in names]
    let_in = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    for name in names:
        assert (ROOT / name).exists(), name
        assert f"!{name}" in let_in, f"{name} is kept out by Dockerfile.dockerignore"
    assert "USER 10001:10001" in lines


# systemd


def unit_environment() -> dict[str, str]:
    lines = (SYSTEMD / "kvrelay.env").read_text(encoding="utf-8").splitlines()
    settings = [line.partition("=") for line in lines if line and not line.startswith("#")]
    return {name: value for name, _, value in settings}


def unit_settings(unit: pathlib.Path) -> dict[str, list[str]]:
    """By name; a setting may be given more than once."""
    settings: dict[str, list[str]] = {}
    for line in unit.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        name, equals, value = line.partition("=")
        assert line.startswith(("#", "[")) or not line.strip() or equals, f"{unit.name}: {line}"
        if equals and not line.startswith("#"):
            settings.setdefault(name, []).append(value.strip())
    return settings


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_run_commands_that_exist(unit: pathlib.Path, dry: None) -> None:
    environment = unit_environment()
    (start,) = unit_settings(unit)["ExecStart"]
    braced = re.sub(r"\$\{(\w+)\}", lambda found: shlex.quote(environment[found[1]]), start)
    filled = re.sub(r"\$(\w+)", lambda found: environment[found[1]], braced)
    (command,) = commands_of([fill_in(word, {}) for word in shlex.split(filled)])
    accept(command)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_drain_before_they_are_killed(unit: pathlib.Path) -> None:
    settings = unit_settings(unit)
    assert settings["KillSignal"] == ["SIGTERM"]
    assert settings["KillMode"] == ["mixed"]
    assert int(settings["TimeoutStopSec"][0]) >= 300
    assert settings["Restart"] == ["on-failure"]  # a drained worker ends with status 0, and stays away
    assert settings["RestartPreventExitStatus"] == ["2"]


def test_instances_of_both_roles_never_share_a_port() -> None:
    ports = []
    for unit in UNITS:
        (start,) = unit_settings(unit)["ExecStart"]
        ports += re.findall(r"--[\w-]*port (\d+)%i", start)
    assert len(ports) == len(set(ports)) >= 3


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_units(tmp_path: pathlib.Path) -> None:
    """With this environment's kvrelay in place of the installed one: systemd wants to find the program."""
    names = []
    for unit in UNITS:
        text = unit.read_text(encoding="utf-8").replace("/opt/kvrelay/bin/kvrelay", shutil.which("true") or "/bin/true")
        (tmp_path / unit.name).write_text(text, encoding="utf-8")
        names.append(str(tmp_path / unit.name.replace("@.", "@1.")))
        overlay = tmp_path / f"{unit.name}.d"
        overlay.mkdir()
        shutil.copy(SYSTEMD / "gpu.conf", overlay / "gpu.conf")
    result = subprocess.run(["systemd-analyze", "verify", "--man=no", *names], capture_output=True, text=True, check=False)
    complaints = [line for line in result.stderr.splitlines() if "kvrelay" in line]
    assert (result.returncode, complaints) == (0, [])


# The page


def test_commands_in_the_page_are_commands(dry: None) -> None:
    page = (ROOT / "docs/deploy.md").read_text(encoding="utf-8")
    found = []
    for block in re.findall(r"^```\w*\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if re.match(r"([\w-]+\$ )?(sudo (-u \w+ )?)?(/opt/kvrelay/bin/)?kvrelay \w", line):
                words = shlex.split(line, comments=True)
                found.append(["kvrelay", *words[[pathlib.PurePath(word).name for word in words].index("kvrelay") + 1 :]])
    for command in found:
        accept(command)
    assert {command[1] for command in found} >= {"router", "worker", "keygen", "probe", "doctor", "drain"}


def test_the_page_names_every_file() -> None:
    page = (ROOT / "docs/deploy.md").read_text(encoding="utf-8")
    for name in ("systemd", "compose", "Dockerfile", *(f"kubernetes/{folder}" for folder in VARIANTS)):
        assert f"../deploy/{name}" in page


def test_the_interpreter_is_new_enough_for_the_image() -> None:
    """The image's Python is one that pyproject.toml allows."""
    (version,) = set(re.findall(r"FROM python:(\d+\.\d+)-", (DEPLOY / "Dockerfile").read_text(encoding="utf-8")))
    assert (3, 11) <= tuple(map(int, version.split("."))) <= (3, max(14, sys.version_info.minor))
