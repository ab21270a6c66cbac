"""A project of somebody else's finds, links and runs what `cmake --install` has installed."""
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

from unittest_main import main

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = pathlib.Path(sys.argv.pop(1)).parent if len(sys.argv) > 1 else ROOT / "build/debug"


def cached(name):
    match = re.search(rf"^{name}:\w+=(.*)$", (BUILD / "CMakeCache.txt").read_text(), re.M)
    return match[1] if match else ""


def run(*command, **options):
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          **options)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


@unittest.skipIf(cached("CHORALE_SANITIZE"), "a consumer would have to be sanitized too")
class Consumer(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="chorale-consumer-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        cls.prefix = cls.folder / "installed"
        run("cmake", "--install", BUILD, "--prefix", cls.prefix)
        # Moved: nothing in it may point to where it was put first.
        cls.prefix = cls.prefix.rename(cls.folder / "moved")
        run("cmake", "-G", "Ninja", "-S", ROOT / "tests/consumer", "-B", cls.folder / "build", "-DCMAKE_BUILD_TYPE=Debug",
            f"-DCMAKE_PREFIX_PATH={cls.prefix}", f"-DCMAKE_CXX_COMPILER={cached('CMAKE_CXX_COMPILER')}",
            "-DCMAKE_EXE_LINKER_FLAGS=-fuse-ld=lld")
        run("ninja", "-C", cls.folder / "build")

    def test_every_way_of_linking_gives_a_program_that_runs(self):
        for form in ("static", "shared", "pkgconfig"):
            with self.subTest(form):
                self.assertIn("[2., 2., 2.]", run(self.folder / f"build/consumer_{form}"))

    def test_the_static_library_leaves_no_library_of_ours_to_be_found(self):
        self.assertNotIn("libchorale", run("ldd", self.folder / "build/consumer_static"))
        self.assertIn("libchorale.so.0.1", run("ldd", self.folder / "build/consumer_shared"))

    def test_the_installed_program_starts_ranks_of_it(self):
        out = run(self.prefix / "bin/chorale", "run", "-n", "2", self.folder / "build/consumer_static", "ranks")
        self.assertEqual(out.count("[4., 4., 4.]"), 2, out)

    def test_neither_ucx_nor_mpi_is_needed_to_start(self):
        for program in (self.prefix / "bin/chorale", self.folder / "build/consumer_static"):
            self.assertNotRegex(run("ldd", program), r"lib(mpi|ucp|ucs|uct|open-rte)\b")

    def test_a_program_with_our_code_in_it_is_small(self):
        run("strip", "-o", self.folder / "stripped", self.folder / "build/consumer_static")
        self.assertLess((self.folder / "stripped").stat().st_size, 20e6)

    def test_modules_are_found_where_they_were_installed(self):
        modules = [path.name for path in (BUILD / "lib").glob("chorale_*.so")]
        self.assertEqual(sorted(path.name for path in (self.prefix / "lib/chorale").iterdir()), sorted(modules))
        if "chorale_mpi.so" in modules:
            self.assertRegex(run(self.prefix / "bin/chorale", "doctor"), r"MPI .* yes")

    def test_what_has_not_been_built_is_built_before_it_is_installed(self):
        # The state after ./chorale, which has no use for the shared library.
        build = self.folder / "little"
        run("cmake", "-G", "Ninja", "-S", ROOT, "-B", build, "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0",
            "-DCHORALE_LAYERS=base", "-DCHORALE_TESTS=OFF", f"-DCMAKE_CXX_COMPILER={cached('CMAKE_CXX_COMPILER')}")
        run("ninja", "-C", build, "chorale_static")
        self.assertFalse((build / "lib/libchorale.so").exists())
        run("cmake", "--install", build, "--prefix", self.folder / "little-installed")
        for name in ("libchorale.a", "libchorale.so"):
            self.assertTrue((self.folder / "little-installed/lib" / name).exists(), name)

    def test_the_installed_program_has_every_command(self):
        out = run(self.prefix / "bin/chorale", "bench", "ops", "--help")
        self.assertIn("--torch-python", out)

    def test_another_minor_version_is_refused(self):
        project = self.folder / "newer"
        project.mkdir()
        (project / "CMakeLists.txt").write_text(
            "cmake_minimum_required(VERSION 3.25)\nproject(newer LANGUAGES NONE)\n"
            "find_package(chorale 0.2 CONFIG QUIET)\nmessage(STATUS \"found ${chorale_FOUND}\")\n")
        out = run("cmake", "-S", project, "-B", project / "build", f"-DCMAKE_PREFIX_PATH={self.prefix}")
        self.assertIn("found 0", out)

    def test_headers_are_those_that_the_umbrella_header_reaches(self):
        installed = {path.relative_to(self.prefix / "include").as_posix() for path in self.prefix.rglob("*.h")}
        self.assertIn("chorale/chorale.h", installed)
        self.assertFalse([name for name in installed if re.search(r"_test_util|kernel/cpu|chorale/app/", name)])


if __name__ == "__main__":
    main()
