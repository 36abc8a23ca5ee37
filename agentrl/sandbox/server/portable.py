"""`fill-tools FOLDER`, in a container of the base image: the tools tree with an interpreter of its own.

    server/ pytest/ editor/   as in the base image
    shield/sitecustomize.py   see `shield`
    python/bin/python3        the base image's interpreter
    python/lib/python3.11/    its standard library
    python/lib/               the shared libraries of both, and `ld-linux.so`, which starts the interpreter

Started through `ld-linux.so --library-path`, so it needs nothing of the root file system that it is mounted in, not
even a C library. Invariant: where `complete.json` is, the tree is whole.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig

COMPLETE = "complete.json"
_LEFT_OUT = ("test", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip", "pydoc_data", "dist-packages")
_LOADED_LATER = ("libgcc_s.so.1",)
"""By the C library itself, when a thread is cancelled."""
_TIMEOUT_S = 60.0


def main(arguments: list[str]) -> None:
    """Fill the folder (an empty or half-filled volume) and print one line of JSON."""
    (folder,) = arguments
    done = os.path.join(folder, COMPLETE)
    if not os.path.isfile(done):
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            if os.path.isdir(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)
        _fill(folder)
        with open(f"{done}.new", "w", encoding="ascii") as file:
            json.dump({}, file)
        os.sync()
        os.rename(f"{done}.new", done)
    print(json.dumps({"ok": True}))


def _fill(folder: str) -> None:
    server = os.path.dirname(os.path.abspath(__file__))
    for name in ("server", "pytest", "editor"):
        shutil.copytree(os.path.join(os.path.dirname(server), name), os.path.join(folder, name), symlinks=True)
    os.mkdir(os.path.join(folder, "shield"))
    shutil.copyfile(os.path.join(server, "shield.py"), os.path.join(folder, "shield", "sitecustomize.py"))
    library = sysconfig.get_path("stdlib")
    target = os.path.join(folder, "python", "lib")
    ignore = shutil.ignore_patterns(*_LEFT_OUT)
    shutil.copytree(library, os.path.join(target, os.path.basename(library)), ignore=ignore)
    os.mkdir(os.path.join(folder, "python", "bin"))
    python = os.path.realpath(sys.executable)
    shutil.copy2(python, os.path.join(folder, "python", "bin", "python3"))
    extensions = os.path.join(library, "lib-dynload")
    programs = [python, *(os.path.join(extensions, name) for name in os.listdir(extensions))]
    for name, path in _libraries(programs).items():
        shutil.copy2(path, os.path.join(target, name))


def _libraries(programs: list[str]) -> dict[str, str]:
    """Name → file of every shared library that `programs` need, the dynamic linker as `ld-linux.so` too."""
    found: dict[str, str] = {}
    said = subprocess.run(["ldd", *programs], check=True, stdout=subprocess.PIPE, text=True, timeout=_TIMEOUT_S).stdout
    for line in said.splitlines():
        words = line.split()
        if len(words) >= 3 and words[1] == "=>" and words[2].startswith("/"):
            found[words[0]] = words[2]
        elif words and words[0].startswith("/") and not words[0].endswith(":"):
            found["ld-linux.so"] = words[0]
    folder = os.path.dirname(found["libc.so.6"])
    found.update({name: os.path.join(folder, name) for name in _LOADED_LATER})
    return found
