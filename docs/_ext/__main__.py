"""`python docs/_ext ROOM.FILE ...` runs a file as a program: `gallery.gpu_notebooks`, for one."""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
    name = sys.argv.pop(1)
    runpy.run_module(name, run_name="__main__", alter_sys=True)
