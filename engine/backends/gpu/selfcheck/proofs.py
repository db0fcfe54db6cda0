"""What checks at start have proved on a kind of device, kept so that it need not be proved at each start.

A proof is a file. It says all that the check depended on: the device, its driver, the versions of torch and Triton,
the sources of the engine and what was compared. Its name is the digest of that. It lies in Triton's cache, so that it
goes with the compiled kernels that it is about. Only agreement is kept: what differs is compared at each start.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

import gptserve.weights as weights_package

logger = logging.getLogger(__name__)

FOLDER = "gptserve-proofs"
DRIVER = Path("/proc/driver/nvidia/version")
"""What the driver says of itself: a line with its version, and more."""
_SOURCES = ("engine", "weights")


@dataclass(frozen=True, slots=True)
class Proofs:
    """The proofs in a folder that hold for these facts; without a folder there are none."""

    folder: Path | None = None
    facts: tuple[str, ...] = ()

    def disagreement(self, what: str, compared: Iterable[object], find: Callable[[], str | None]) -> str | None:
        """Return what `find` does: how `what` differs, or None. None at once where that is proved.

        The repr of `compared` tells apart all for which `find` may return something else.
        """
        if self.folder is None:
            return find()
        proof = "\n".join((*self.facts, what, *map(repr, compared), ""))
        path = self.folder / hashlib.sha256(proof.encode()).hexdigest()
        if _read(path) == proof.encode():
            return None
        found = find()
        if found is None:
            _keep(path, proof.encode())
        return found


NO_PROOFS = Proofs()


def proofs_of(device: torch.device) -> Proofs:
    """Return those of a GPU; none where the device is a CPU, or does not say what it is."""
    if device.type != "cuda" or not torch.cuda.is_available() or find_spec("triton") is None:
        return NO_PROOFS
    driver = _read(DRIVER)
    if driver is None:
        return NO_PROOFS
    import triton

    options = (triton.knobs.compilation.knobs, triton.knobs.language.knobs)
    facts = (
        torch.cuda.get_device_name(device),
        str(torch.cuda.get_device_capability(device)),
        driver.decode(errors="replace").partition("\n")[0],
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, Triton {triton.__version__}",
        repr(options),
        f"sources {digest_of_sources(Path(str(weights_package.__file__)).parents[1])}",
    )
    return Proofs(Path(triton.knobs.cache.dir) / FOLDER, facts)


@functools.cache
def digest_of_sources(package: Path) -> str:
    """Return a digest of the Python files that kernels, their launches and the checks may depend on."""
    digest = hashlib.sha256()
    for path in sorted(path for name in _SOURCES for path in (package / name).resolve().rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _keep(path: Path, proof: bytes) -> None:
    """Write a proof, whole or not at all, as several processes may write it at once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(dir=path.parent)
        try:
            with open(descriptor, "wb") as file:
                file.write(proof)
            os.replace(partial, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise
    except OSError as error:
        logger.info("the next start compares the GPU's kernels again, as %s cannot be written: %s", path.parent, error)
