"""The command line: `python -m moesaic run --spec layer.toml …`."""

from __future__ import annotations

import os
import pathlib
import shutil
import sys

BUNDLED = pathlib.Path(__file__).parent / "bin" / "moesaic"


def program() -> str:
    """Returns the program of the command line: the wheel's own, or the one on PATH."""
    if BUNDLED.is_file():
        if not os.access(BUNDLED, os.X_OK):
            BUNDLED.chmod(0o755)
        return str(BUNDLED)
    found = shutil.which("moesaic")
    if found is None:
        sys.exit(
            "this wheel was built without the command line, and there is no `moesaic` on PATH:\n"
            "install it with `cargo install --path cli`, or copy the program to "
            "interop/python/python/moesaic/bin/ before you build the wheel"
        )
    return found


def main() -> None:
    """Becomes the command line, so that signals and exit codes are its own."""
    path = program()
    os.execv(path, ["moesaic", *sys.argv[1:]])


if __name__ == "__main__":
    main()
