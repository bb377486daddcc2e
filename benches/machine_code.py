"""How many loads from global memory NVIDIA's kernels have in flight, by their machine code.

    pip download nvidia-cuda-nvdisasm && unzip nvidia_cuda_nvdisasm*.whl
    MOESAIC_CACHE=STORE moesaic precompile --spec SPEC --target cuda:sm_90a
    python3 benches/machine_code.py nvidia/cu13/bin/nvdisasm STORE

A load is in flight until an instruction reads a register that it, or a later load, fills: counted along
the text, as if no branch were taken. `alone` are loads that are waited for while no other is in flight,
and `early` what touches global memory before a kernel has waited for the launches before it: there may be none.
"""

import pathlib
import re
import subprocess
import sys
import tempfile

INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+\s+)?(\S+)\s*(.*?);")

ACCESSES = ("LDG", "STG", "LDGSTS", "ATOM", "RED.", "UTMALDG", "UTMASTG", "UBLKCP")


def words_of(opcode):
    return 4 if ".128" in opcode else 2 if ".64" in opcode else 1


def registers(opcode, operands):
    """What an instruction reads: addresses are pairs, and stores read as much as they write."""
    for name, pair in re.findall(r"\bR(\d+)\b(\.64)?", operands):
        wide = words_of(opcode) if opcode.startswith("ST") and not pair else 2 if pair else 1
        yield from range(int(name), int(name) + wide)


def count(lines):
    """Loads, the most of them in flight, those that are waited for alone, and accesses that do not wait for
    the launches before (`griddepcontrol.wait` is ACQBULK)."""
    loads = most = alone = early = 0
    waits = any("ACQBULK" in line for line in lines)
    filled_by = {}
    for line in lines:
        found = INSTRUCTION.match(line)
        if not found:
            continue
        opcode, operands = found.groups()
        waits = waits and opcode != "ACQBULK"
        early += waits and opcode.startswith(ACCESSES)
        is_load = opcode.startswith("LDG.")
        filled, _, read = operands.partition(",") if is_load else ("", "", operands)
        waited = [filled_by[name] for name in registers(opcode, read) if name in filled_by]
        if waited:
            alone += len(set(filled_by.values())) == 1
            filled_by = {name: n for name, n in filled_by.items() if n > max(waited)}
        if is_load:
            loads += 1
            first = int(filled.strip().removeprefix("R"))
            filled_by.update((first + n, loads) for n in range(words_of(opcode)))
            most = max(most, len(set(filled_by.values())))
    return loads, most, alone, early


def functions(disassembly):
    parts = re.split(r"^\.text\.(\w+):", disassembly, flags=re.M)
    return zip(parts[1::2], parts[2::2])


def disassembled(nvdisasm, kernel):
    stored = kernel.read_bytes()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(stored[stored.index(b"\x7fELF"):])
        cubin.flush()
        return subprocess.run([nvdisasm, "-c", cubin.name], capture_output=True, text=True, check=True).stdout


def main(nvdisasm, *stores):
    for store in stores:
        for kernel in sorted(pathlib.Path(store).glob("v1/*/*.kernel")):
            about = kernel.with_suffix(".cu").read_text().split("\n")[0].removeprefix("// ")
            for name, part in functions(disassembled(nvdisasm, kernel)):
                loads, most, alone, early = count(part.split("\n"))
                if loads:
                    print(f"{about:64} {name:28} loads {loads:3}, in flight {most:2}, alone {alone:2}, early {early}")


main(*sys.argv[1:])
