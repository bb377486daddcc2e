"""How many loads from global memory NVIDIA's kernels have under way, by their machine code.

    pip download nvidia-cuda-nvdisasm && unzip nvidia_cuda_nvdisasm*.whl
    MOESAIC_CACHE=STORE moesaic precompile --spec SPEC --target cuda:sm_90a
    python3 benches/machine_code.py nvidia/cu13/bin/nvdisasm STORE

A load is under way until an instruction reads a register that it, or a later load, fills: counted along
the text, as if no branch were taken. `alone` are loads that are waited for while no other is under way.
"""

import pathlib
import re
import subprocess
import sys

INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(.*?);")
LOAD = re.compile(r"\bLDG\S*\s+R(\d+)")


def registers_of_load(text, first):
    words = 4 if ".128" in text else 2 if ".64" in text else 1
    return range(first, first + words)


def count(lines):
    """Loads, the most of them under way, and those that are waited for alone."""
    loads = most = alone = 0
    filled_by = {}
    for line in lines:
        found = INSTRUCTION.match(line)
        if not found:
            continue
        text = found[1]
        used = [int(name) for name in re.findall(r"\bR(\d+)\b", text)]
        load = LOAD.search(text)
        if load:
            used = used[1:]
        waited = [filled_by[name] for name in used if name in filled_by]
        if waited:
            alone += len(set(filled_by.values())) == 1
            filled_by = {name: n for name, n in filled_by.items() if n > max(waited)}
        if load:
            loads += 1
            filled_by.update((name, loads) for name in registers_of_load(text, int(load[1])))
            most = max(most, len(set(filled_by.values())))
    return loads, most, alone


def functions(disassembly):
    parts = re.split(r"^\.text\.(\w+):", disassembly, flags=re.M)
    return zip(parts[1::2], parts[2::2])


def main(nvdisasm, *stores):
    for store in stores:
        for kernel in sorted(pathlib.Path(store).glob("v1/*/*.kernel")):
            stored = kernel.read_bytes()
            cubin = pathlib.Path("/tmp/machine_code.cubin")
            cubin.write_bytes(stored[stored.index(b"\x7fELF"):])
            about = kernel.with_suffix(".cu").read_text().split("\n")[0].removeprefix("// ")
            text = subprocess.run([nvdisasm, "-c", cubin], capture_output=True, text=True, check=True).stdout
            for name, part in functions(text):
                loads, most, alone = count(part.split("\n"))
                if loads:
                    print(f"{about:64} {name:28} loads {loads:3}, under way {most:2}, alone {alone:2}")


main(*sys.argv[1:])
