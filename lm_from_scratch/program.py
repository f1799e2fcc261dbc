"""How the program was called, so that a hint can be typed as it is printed."""

import sys
from pathlib import Path

SCRIPT, MODULE = "lm-from-scratch", "python -m lm_from_scratch"
PROGRAM = SCRIPT if Path(sys.argv[0]).stem == SCRIPT else MODULE
