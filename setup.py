"""What pyproject.toml cannot say: a wheel takes the sources of the exercises along.

They lie in tutorials/exercises, outside the package; in a clone they are read from there.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithExercises(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "lm_from_scratch" / "exercises" / "sources"
            target.mkdir(parents=True, exist_ok=True)
            for source in sorted(Path("tutorials/exercises").glob("*.py")):
                shutil.copy(source, target)


setup(cmdclass={"build_py": WithExercises})
