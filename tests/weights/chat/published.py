"""The chat templates of published models that published.toml names, from the packages that carry them.

    python -m tests.weights.chat.published    # downloads those that are missing into build/templates, by pip

None is a part of this repository. Each has the digest that it had when its line was written.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FOLDER = HERE.parents[2] / "build" / "templates"
PACKAGES = {  # with the folder of the templates in the archive
    "llama-cpp-python": ("llama-cpp-python==0.3.36", "vendor/llama.cpp/models/templates/"),
    "trl": ("trl==1.16.0", "trl/chat_templates/"),
    "axolotl": ("axolotl==0.19.0", "axolotl/utils/chat_templates/templates/"),
}
SOURCES_ONLY = "llama-cpp-python"  # its wheels lack them


@dataclass(frozen=True)
class Published:
    """A template. `form` is the format of its calls, "" for none that is known; `think` the mark that ends reasoning.

    With `shows_calls` it writes the calls of a conversation, as some only ask for them.
    """

    name: str
    package: str
    sha256: str
    form: str
    think: str
    shows_calls: bool

    @property
    def path(self) -> Path:
        return FOLDER / self.package / f"{self.name}.jinja"

    def source(self) -> str:
        """Return its text; skip the test without one."""
        if not self.path.exists():
            pytest.skip("needs what `make templates` downloads")
        return self.path.read_text(encoding="utf-8")


def published() -> list[Published]:
    """Return all that published.toml names."""
    packages = tomllib.loads((HERE / "published.toml").read_text(encoding="utf-8"))
    found = []
    for package, templates in packages.items():
        for name, of in templates.items():
            form = of.get("format", "")
            found.append(
                Published(name, package, of["sha256"], form, of.get("think", ""), of.get("shows_calls", form != ""))
            )
    return found


def main() -> None:
    """Download what is missing. Exits with a message if a template is another than before."""
    wanted: dict[str, list[Published]] = {}
    for template in published():
        if not template.path.exists():
            wanted.setdefault(template.package, []).append(template)
    for package, templates in wanted.items():
        requirement, inner = PACKAGES[package]
        with tempfile.TemporaryDirectory() as folder:
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
            subprocess.run([*pip, "--no-binary", SOURCES_ONLY, "--dest", folder, requirement], check=True)
            [archive] = Path(folder).iterdir()
            found = _files_of(archive, inner)
        for template in templates:
            data = found.get(f"{template.name}.jinja", b"")
            if hashlib.sha256(data).hexdigest() != template.sha256:
                sys.exit(f"{requirement} has another {template.name}.jinja than published.toml says")
            template.path.parent.mkdir(parents=True, exist_ok=True)
            template.path.write_bytes(data)


def _files_of(archive: Path, inner: str) -> Mapping[str, bytes]:
    """Return the files in the folder `inner` of an archive, by name."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return {Path(name).name: wheel.read(name) for name in wheel.namelist() if name.startswith(inner)}
    with tarfile.open(archive) as sdist:
        found = ((member, sdist.extractfile(member)) for member in sdist if f"/{inner}" in member.name)
        return {Path(member.name).name: file.read() for member, file in found if file is not None}


if __name__ == "__main__":
    main()
