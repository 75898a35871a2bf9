"""What `kvrelay serve` or `kvrelay router` is to run, whether the router lives in this process or several have theirs."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrelay.checkpoint.fetch import resolve
from kvrelay.checkpoint.lora import named_folders
from kvrelay.config import ClusterOptions, Environment, ModelOptions, RouterOptions
from kvrelay.errors import ConfigError
from kvrelay.frontend.service import served_names
from kvrelay.launch.cluster import FREE_LOCAL_PORT
from kvrelay.media.image_spec import read_image_spec
from kvrelay.options import RoleOptions, flag_of
from kvrelay.progress import Progress
from kvrelay.states import Role
from kvrelay.wire.launcher import ToRouter


class Tie(Protocol):
    """To the process that launched this one (worker/launcher.py)."""

    on_told: Callable[[ToRouter], None]

    def ready(self) -> None: ...


@dataclass(frozen=True)
class Launch:
    """`commands` tells how to start a worker of each role, from the model's folder and the address at which it registers."""

    model: ModelOptions
    router: RouterOptions
    cluster: ClusterOptions
    environment: Environment
    roles: Sequence[Role] = ()
    commands: Callable[[pathlib.Path, str], list[list[str]]] = lambda *_: []
    default_listen: str = FREE_LOCAL_PORT  # of an embedded registry

    @functools.cached_property
    def served(self) -> list[str]:
        """The names under which clients know the model."""
        return served_names(self.router, self.model.model)

    def fetch(self, progress: Progress) -> pathlib.Path:
        """The model's folder. Raises ConfigError for a model that cannot do what was asked for."""
        folder = resolve(self.model.model, self.environment, progress)
        if Role.ENCODE in self.roles and read_image_spec(folder) is None:
            raise ConfigError(f"--encode: {self.model.model} is a text model; it has no images to encode")
        return folder

    def check_adapters(self, per_role: Mapping[Role, RoleOptions]) -> None:
        """Refuses adapters under a name of the model: no request could ask for them."""
        for role, its in per_role.items():
            flag = flag_of("lora", None if its.model.lora == self.model.lora else role)
            for name in named_folders(its.model.lora, flag):
                if name in self.served:
                    raise ConfigError(f"{flag} {name}=...: that is a name of the model itself")
