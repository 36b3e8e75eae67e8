"""What pyproject.toml cannot say: this package is for Linux."""

import sys

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel

if sys.platform != "linux":
    raise SystemExit(f"sidesave runs on Linux only (it needs memfd, pidfd and O_DIRECT); this is {sys.platform}")


class LinuxWheel(bdist_wheel):
    """A pure-Python wheel that installers refuse elsewhere: the platforms that PyTorch publishes Linux wheels for."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", "manylinux_2_28_x86_64.manylinux_2_28_aarch64"


setup(cmdclass={"bdist_wheel": LinuxWheel})
