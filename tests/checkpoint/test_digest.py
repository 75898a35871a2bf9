from __future__ import annotations

import pathlib

from kvrelay.checkpoint.digest import weights_digest


def test_equal_weights_have_equal_digests_and_others_do_not(tmp_path: pathlib.Path) -> None:
    content = bytes(range(256)) * 4096
    digests = []
    for name, changed in (("a", None), ("b", None), ("c", 1), ("d", 2)):
        folder = tmp_path / name
        folder.mkdir()
        values = content if changed is None else bytes((value + changed) % 256 for value in content)
        (folder / "model.safetensors").write_bytes(values)
        digests.append(weights_digest(folder))
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
