"""Builds Chorale's communication as a static library, and the extension on top of it. Nothing is written beside the sources:
what is built on the way lies in a temporary folder, or in build/torch for `build_ext --inplace`, which is for work on it."""

import atexit
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

HERE = pathlib.Path(__file__).parent.resolve()
ROOT = HERE.parent.parent
LAYERS = ["reducer"]
IN_PLACE = "--inplace" in sys.argv
WORK = ROOT / "build" / "torch"
if not IN_PLACE:
    WORK = pathlib.Path(tempfile.mkdtemp(prefix="chorale-torch-"))
    atexit.register(shutil.rmtree, WORK, ignore_errors=True)


class Build(BuildExtension):
    def build_extensions(self):
        out = WORK if IN_PLACE else WORK / "library"
        needed = subprocess.check_output([ROOT / "tools" / "layers", "--needed", ",".join(LAYERS)], text=True).strip()
        subprocess.check_call(
            ["cmake", "-S", ROOT, "-B", out, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DCHORALE_GROUPED=ON",
             "-DCHORALE_TESTS=OFF", f"-DCHORALE_LAYERS={needed}"])
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count()))
        subprocess.check_call(["cmake", "--build", out, "--target", "chorale_static", "-j", jobs])
        needs = next(line for line in (out / "chorale.pc").read_text().splitlines() if line.startswith("Libs.private:"))
        for extension in self.extensions:
            extension.extra_objects.append(str(out / "lib" / "libchorale.a"))
            extension.extra_link_args += ["-Wl,--as-needed", *needs.split()[1:]]
        super().build_extensions()


setup(
    options={} if IN_PLACE else {"build": {"build_base": str(WORK / "build")}, "egg_info": {"egg_base": str(WORK)}},
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
