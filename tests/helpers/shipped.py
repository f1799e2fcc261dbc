"""The models that come with the package, and what their records say."""

import json

import pytest

from lm_from_scratch.checkpoint.folders import PRETRAINED

NAMES = sorted(path.parent.name for path in PRETRAINED.glob("*/record.json"))
RECORDS = {name: json.loads((PRETRAINED / name / "record.json").read_text()) for name in NAMES}
each = pytest.mark.parametrize("name", NAMES)
