"""What clients call the requests that can be continued from."""

from __future__ import annotations

from collections import OrderedDict

from kvrelay.router.parent import Parent

_MAX_REASONS = 4096  # names that stand for nothing any more, of which it is known why

_Name = tuple[str, str]  # owner, and what it calls a request


class Names:
    """All choices of one answer, under each of its names; and, for a while, why a name stands for nothing any more."""

    def __init__(self) -> None:
        self._families: dict[_Name, list[Parent]] = {}
        self._reasons: OrderedDict[_Name, str] = OrderedDict()

    def get(self, owner: str, name: str) -> list[Parent]:
        return self._families.get((owner, name), [])

    def why(self, owner: str, name: str) -> str:
        """Empty if nothing is known of it."""
        return self._reasons.get((owner, name), "")

    def give(self, parents: list[Parent]) -> None:
        """Under a name that is used again, the latest request is found. Prompts of one request share theirs."""
        for name in _names_of(parents[0]):
            family = self._families.get(name)
            same = family and family[0].answer_id and family[0].answer_id == parents[0].answer_id
            self._families[name] = [*family, *parents] if family and same else list(parents)
            self._reasons.pop(name, None)

    def join(self, parent: Parent) -> None:
        """One of several choices, of which another router knew, under the names that it does not have yet."""
        for name in _names_of(parent):
            family = self._families.setdefault(name, [])
            if parent not in family:
                family.append(parent)

    def take(self, parent: Parent, reason: str) -> None:
        for name in _names_of(parent):
            family = self._families.get(name, [])
            if parent in family:
                family.remove(parent)
                if not family:
                    del self._families[name]
                    self.explain(*name, reason)

    def explain(self, owner: str, name: str, reason: str) -> None:
        self._reasons[owner, name] = reason
        self._reasons.move_to_end((owner, name))
        if len(self._reasons) > _MAX_REASONS:
            self._reasons.popitem(last=False)


def _names_of(parent: Parent) -> list[_Name]:
    names = {parent.external_id, parent.answer_id} - {""}
    return [(parent.owner, name) for name in names]
