"""tools/docs builds the site: a page per op and per module, an index of names, search, and no link that leads nowhere."""
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

from unittest_main import main

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = (pathlib.Path(sys.argv.pop(1)) if len(sys.argv) > 1 else ROOT / "build/debug/bin") / "chorale"
sys.path.insert(0, str(ROOT / "tools/doc_site"))

import links  # noqa: E402


def run(*command):
    return subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


class Docs(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="chorale-docs-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        cls.site = cls.folder / "site"
        cls.done = run(ROOT / "tools/docs", "--program", PROGRAM, "--out", cls.site)

    def test_every_link_leads_somewhere(self):
        self.assertEqual(self.done.returncode, 0, self.done.stdout)

    def test_every_op_has_a_page_with_its_facts(self):
        ops = json.loads(run(PROGRAM, "ops", "--json").stdout)
        self.assertGreater(len(ops), 200)
        without = []
        for row in ops:
            page = (self.site / f"ops/{row['name']}.html").read_text()
            for place in ("facts", "shapes", "row"):
                self.assertIn(f'id="{place}"', page, row["name"])
            self.assertTrue(row["facts"].get("expression") or row["facts"]["formula"], row["name"])
            for fact in ("gradient", "sharding", "dtypes"):
                self.assertTrue(row["facts"][fact], row["name"])
            if 'id="example"' not in page:
                without.append(row["name"])
        self.assertEqual(without, [])
        page = (self.site / "ops/matmul.html").read_text()
        for text in ("sum over k", "Gradient", "...mk,...kn-&gt;...mn", 'id="example"', 'id="row"', "PyTorch&#x27;s rules"):
            self.assertIn(text, page.replace("'", "&#x27;"))

    def test_a_function_without_a_row_names_the_rows_that_it_chooses_from(self):
        self.assertIn("gelu_erf, gelu_tanh\n", run(PROGRAM, "ops", "gelu").stdout)
        self.assertNotIn("made of", run(PROGRAM, "ops", "conv2d").stdout)

    def test_every_module_has_a_page(self):
        declared = set()
        for path in (ROOT / "src/chorale/nn").glob("*.h"):
            declared |= set(re.findall(r"^(?:class|struct) (\w+)(?: final)? : (?:public )?Module\b", path.read_text(), re.M))
        self.assertIn("Linear", declared)
        for name in declared:
            self.assertTrue((self.site / f"modules/nn-{name}.html").is_file(), name)
        page = (self.site / "modules/nn-Conv2d.html").read_text()
        for text in ("padding_mode", "forward", "weight"):
            self.assertIn(text, page)

    def test_the_index_leads_from_names_to_pages(self):
        index = (self.site / "names.html").read_text()
        for name in ("nn::Linear", "matmul", "comm::Group::all_reduce", "optim::AdamW", "DType::kBF16", "parallel::join"):
            self.assertIn(f"<b>{name}</b>", index)
        matmul = re.search(r"<b>matmul</b>(.*?)</div>", index)[1]
        for page in ("api/op-product.html#matmul", "ops/matmul.html", "usage/tensors.html"):
            self.assertIn(page, matmul)

    def test_guides_hide_what_is_for_tests(self):
        page = (self.site / "usage/tensors.html").read_text()
        self.assertNotIn("CHECK(", page)
        self.assertIn('<div class="label">prints</div>', page)

    def test_broken_links_and_files_from_elsewhere_are_found(self):
        folder = self.folder / "broken"
        folder.mkdir()
        (folder / "a.html").write_text('<p id="x"><a href="b.html">b</a> <a href="#x">x</a> <a href="#y">y</a>'
                                       '<script src="https://example.org/x.js"></script><a href="https://example.org">e</a>')
        self.assertEqual(links.broken(folder), ["a.html: b.html is not there", "a.html: #y: no such place in that page",
                                                "a.html: loads https://example.org/x.js from elsewhere"])

    def test_a_guide_may_not_mention_a_name_that_does_not_exist(self):
        script = ("import sys; sys.path.insert(0, sys.argv[1]); from site_pages import Site; s = Site(); "
                  "s.name('nn::Linear', 'm.html'); s.add('g.html', 'G', 'guide', '<code>nn::Linear(2, 2)</code> <code>nn::Linaer</code>'); "
                  "s.link_names(); print(s.wrong, s.pages['g.html'][2])")
        out = run("/usr/bin/python3", "-c", script, ROOT / "tools/doc_site").stdout
        self.assertIn("['g.html: there is no nn::Linaer']", out)
        self.assertIn('<a href="m.html"><code>nn::Linear(2, 2)</code></a>', out)

    @unittest.skipUnless(shutil.which("chromium"), "chromium is not installed")
    def test_search_finds_an_op_in_a_browser(self):
        page = run("timeout", "60", "chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={self.folder}/browser",
                   "--virtual-time-budget=2000", "--dump-dom", f"file://{self.site}/index.html?q=matmul").stdout
        results = re.search(r'<div id="results">(.*?)<div class="columns">', page, re.S)
        self.assertIsNotNone(results, page[-2000:])
        self.assertLess(results[1].index("ops/matmul.html"), 1000)


if __name__ == "__main__":
    main()
