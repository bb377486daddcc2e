"""`python -m moesaic`."""

import os
import subprocess
import sys

import moesaic.__main__ as command


def call(path, *words):
    environment = {**os.environ, "PATH": str(path)}
    program = [sys.executable, "-m", "moesaic", *words]
    return subprocess.run(program, env=environment, capture_output=True, text=True)


def test_the_program_on_path_gets_words_and_gives_its_code(tmp_path):
    if command.BUNDLED.is_file():
        return
    assert "cargo install" in call(tmp_path).stderr
    program = tmp_path / "moesaic"
    program.write_text('#!/bin/sh\necho "$@"\nexit 7\n')
    program.chmod(0o755)
    done = call(tmp_path, "doctor", "--ranks", "4")
    assert (done.stdout, done.returncode) == ("doctor --ranks 4\n", 7)
