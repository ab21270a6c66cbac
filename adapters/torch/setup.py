"""Builds Chorale's communication as a static library, and the extension on top of it."""

import os
import pathlib
import subprocess

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

HERE = pathlib.Path(__file__).parent.resolve()
ROOT = HERE.parent.parent
LAYERS = ["reducer"]


class Build(BuildExtension):
    def build_extensions(self):
        out = ROOT / "build" / "torch"
        needed = subprocess.check_output([ROOT / "tools" / "layers", "--needed", ",".join(LAYERS)], text=True).strip()
        subprocess.check_call(
            ["cmake", "-S", ROOT, "-B", out, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DCHORALE_TESTS=OFF",
             f"-DCHORALE_LAYERS={needed}"])
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count()))
        subprocess.check_call(["cmake", "--build", out, "--target", "chorale_static", "-j", jobs])
        needs = next(line for line in (out / "chorale.pc").read_text().splitlines() if line.startswith("Libs.private:"))
        for extension in self.extensions:
            extension.extra_objects.append(str(out / "lib" / "libchorale.a"))
            extension.extra_link_args += ["-Wl,--as-needed", *needs.split()[1:]]
        super().build_extensions()


setup(
    ext_modules=[
        CppExtension(
            "chorale_torch._C",
            sorted(str(path.relative_to(HERE)) for path in (HERE / "csrc").glob("*.cc")),
            include_dirs=[str(ROOT / "src"), str(HERE / "csrc")],
            extra_compile_args=["-std=c++20", "-O2", "-g0", "-fvisibility=hidden"],
            extra_link_args=["-Wl,--exclude-libs,libchorale.a"],
        )
    ],
    cmdclass={"build_ext": Build},
)
