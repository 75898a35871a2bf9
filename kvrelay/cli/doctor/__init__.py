"""`kvrelay doctor`: what this machine has, what is missing, and what to do about it.

    machine.py    what any machine needs
    host.py       what a host of a cluster needs: limits, kernel, transports, threads
    network.py    who reaches whom: addresses, ports, registry, peers, the cluster key

The last two are looked at when an option names a part of a cluster.
"""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvrelay.cli.doctor.finding import Finding, Grade
from kvrelay.cli.doctor.host import host_checks
from kvrelay.cli.doctor.machine import machine_checks
from kvrelay.cli.doctor.network import Cluster, network_checks
from kvrelay.config import Environment, RouterOptions, read_environment
from kvrelay.options import Parser

__all__ = ["Cluster", "Finding", "Grade", "examine", "examine_cluster", "run"]

_COLOURS = {Grade.OK: "green", Grade.WARN: "yellow", Grade.FAIL: "red"}
_EPILOG = """\
examples:
  kvrelay doctor                                          this machine alone
  kvrelay doctor --registry etcd://10.0.0.1:2379 --worker-host 10.0.0.2 --worker-port 5700
  kvrelay doctor --registry tcp://10.0.0.1:5600 --cluster-key cluster.key --peer 10.0.0.3:5700 --peer 10.0.0.4
"""


def build_parser() -> Parser:
    parser = Parser(prog="kvrelay doctor", description="Checks this machine and says what to do.", epilog=_EPILOG)
    parser.add_argument("--port", type=int, default=RouterOptions().port, metavar="N", help="HTTP port you mean to use")
    section = parser.add_argument_group("A host of a cluster")
    section.add_argument(
        "--registry", default="", metavar="ADDRESS", help="tcp://HOST:PORT or etcd://HOST:PORT: is it reached?"
    )
    section.add_argument(
        "--peer", action="append", default=[], metavar="HOST[:PORT]", help="another host, or a worker on it; may be repeated"
    )
    section.add_argument("--cluster-key", default="", metavar="FILE", help="the cluster's key file")
    section.add_argument("--worker-host", default="", metavar="ADDRESS", help="address on which workers here will listen")
    section.add_argument("--worker-port", type=int, default=0, metavar="N", help="port you mean to use: is it free?")
    section.add_argument("--signal-port", type=int, default=0, metavar="N", help="port you mean to use: is it free?")
    section.add_argument("--threads", type=int, default=0, metavar="N", help="CPU threads of all workers here together")
    return parser


def run(argv: list[str]) -> int:
    """Exit status 1 if anything fails."""
    arguments = build_parser().parse_strictly(argv)
    environment = read_environment()
    findings = examine(environment, arguments.port)
    cluster = _cluster(arguments, environment)
    if cluster != Cluster():
        findings |= examine_cluster(cluster)
    table = Table("check", "", "found", "what to do")
    for name, finding in findings.items():
        graded = f"[{_COLOURS[finding.grade]}]{finding.grade.value}[/]"
        table.add_row(escape(name), graded, escape(finding.found), escape(finding.remedy))
    Console().print(table)
    return 1 if any(finding.grade is Grade.FAIL for finding in findings.values()) else 0


def examine(environment: Environment, port: int) -> dict[str, Finding]:
    return {name: check() for name, check in machine_checks(environment, port).items()}


def examine_cluster(cluster: Cluster) -> dict[str, Finding]:
    checks = host_checks(cluster.threads) | network_checks(cluster)
    return {name: check() for name, check in checks.items()}


def _cluster(arguments: argparse.Namespace, environment: Environment) -> Cluster:
    return Cluster(
        registry=arguments.registry,
        peers=tuple(arguments.peer),
        key_file=arguments.cluster_key or environment.cluster_key,
        worker_host=arguments.worker_host,
        ports=tuple(port for port in (arguments.worker_port, arguments.signal_port) if port),
        threads=arguments.threads,
    )
