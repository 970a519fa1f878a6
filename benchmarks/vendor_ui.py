"""Fetches the page's libraries from npm into src/stoker/page/static/vendor, with their licences; `make ui-vendor`.

The files are those of the packages, as modules that a browser loads without a build step: a bare import of `preact`
becomes a relative one, uPlot's script gets an export, and the names of source maps, which are not shipped, go.
axe-core is for the browser tests only.
"""

from __future__ import annotations

import io
import subprocess
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
STATIC = ROOT / "src/stoker/page/static/vendor"
TESTS = ROOT / "tests/page/browser/vendor"
PACKAGES = {  # package@version -> (folder, {file in the package: name here})
    "preact@11.2.0": (
        STATIC,
        {"dist/preact.mjs": "preact.mjs", "hooks/dist/hooks.mjs": "hooks.mjs", "LICENSE": "LICENSE.preact"},
    ),
    "htm@3.1.1": (STATIC, {"dist/htm.module.js": "htm.mjs", "LICENSE": "LICENSE.htm"}),
    "uplot@1.6.32": (
        STATIC,
        {"dist/uPlot.iife.min.js": "uplot.mjs", "dist/uPlot.min.css": "uplot.css", "LICENSE": "LICENSE.uplot"},
    ),
    "axe-core@4.14.1": (TESTS, {"axe.min.js": "axe.min.js", "LICENSE": "LICENSE.axe-core"}),
}


def as_module(name: str, text: str) -> str:
    """A library's file as a module of the page."""
    lines = [line for line in text.splitlines() if not line.startswith("//# sourceMappingURL=")]
    text = "\n".join(lines).rstrip() + "\n"
    if name == "hooks.mjs":
        text = text.replace('from"preact"', 'from"./preact.mjs"')
    if name == "uplot.mjs":
        text += "export default uPlot;\n"
    return text


def fetch(package: str) -> tarfile.TarFile:
    """The package's archive, by npm's own client."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", "--silent", "--pack-destination", folder, package]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(folder).glob("*.tgz")
        return tarfile.open(fileobj=io.BytesIO(archive.read_bytes()))


def main() -> None:
    """Writes every file of `PACKAGES`."""
    for package, (folder, files) in PACKAGES.items():
        folder.mkdir(parents=True, exist_ok=True)
        with fetch(package) as archive:
            for source, name in files.items():
                member = archive.extractfile(f"package/{source}")
                assert member is not None, f"{package} has no {source}"
                text = member.read().decode()
                (folder / name).write_text(as_module(name, text) if name.endswith((".mjs", ".js")) else text)
                print(f"{package}: {name}")


if __name__ == "__main__":
    main()
