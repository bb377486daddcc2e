"""Packs folders of fixtures: `pack.py hf families` writes `hf.tar` and `families.tar`.

To change a fixture, unpack its archive first: `mkdir -p hf && tar -xf hf.tar -C hf`. An archive has
the same bytes wherever it is packed, and the folders that went into it are removed.
"""

import pathlib
import shutil
import sys
import tarfile

HERE = pathlib.Path(__file__).parent


def fixtures(folder):
    """The entries of `folder` that are fixtures: folders and safetensors files."""
    found = [path for path in folder.iterdir() if path.is_dir() or path.suffix == ".safetensors"]
    return sorted(path for path in found if path.name != "__pycache__")


def plain(member):
    """`member` without what differs between machines."""
    member.mtime = member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode = 0o644
    return member


def pack(name):
    """Writes the archive, then removes what it holds."""
    entries = fixtures(HERE / name)
    if not entries:
        sys.exit(f"{HERE / name} holds no fixtures")
    with tarfile.open(HERE / f"{name}.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
        for entry in entries:
            files = sorted(entry.iterdir()) if entry.is_dir() else [entry]
            for file in files:
                member = archive.gettarinfo(file, str(file.relative_to(HERE / name)))
                archive.addfile(plain(member), file.open("rb"))
    for entry in entries:
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


for name in sys.argv[1:]:
    pack(name)
