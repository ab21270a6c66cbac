"""Pages with a frame around them, an index of names, and an index for searching."""
import html
import json
import os
import pathlib
import re
import shutil

import links
import markup

FILES = pathlib.Path(__file__).resolve().parent
# Namespaces in which every name that a guide mentions must exist.
OWN = re.compile(r"^(?:nn|optim|data|comm|parallel|io|models|text|trace)(?:::\w+)+")

# What guides write: a name, or a member of something whose type its name tells.
EXPRESSION = re.compile(r"(?:(?P<object>[a-z]\w*)\.(?P<member>\w+))|(?P<name>(?:\w+::)*[A-Za-z_]\w*)")
OBJECTS = {"x": ["Tensor"], "w": ["Tensor"], "loss": ["Tensor"], "group": ["comm::Group"], "trial": ["comm::Group"],
           "world": ["comm::World"], "work": ["comm::Work"], "model": ["nn::Module", "parallel::DataParallelBase"],
           "ddp": ["parallel::DataParallelBase", "nn::Module"], "optimizer": ["optim::Optimizer"], "net": ["nn::Module"],
           "loader": ["data::LoaderBase", "data::DataLoader"], "bpe": ["text::Bpe"], "scheduler": ["optim::Scheduler"]}


class Site:
    def __init__(self):
        self.pages = {}  # address: (title, kind, body)
        self.names = {}  # public name: [address], the best first
        self.by_last_part = {}
        self.wrong = []

    def add(self, address, title, kind, body):
        if address in self.pages:
            raise SystemExit(f"two pages want to be {address}")
        self.pages[address] = (title, kind, body)

    def name(self, name, address):
        places = self.names.setdefault(name, [])
        if address not in places:
            places.append(address)

    def link_names(self):
        """Makes links of the names in guides, and notes for each name which guides mention it."""
        for name in self.names:
            self.by_last_part.setdefault(name.rsplit("::", 1)[-1], []).append(name)
        for address, (title, kind, body) in list(self.pages.items()):
            if kind != "guide":
                continue
            self.pages[address] = (title, kind, re.sub(
                r"<code>([^<]+)</code>(?!</pre>)", lambda match, at=address: self.linked(match, at), body))
            code = markup.plain(" ".join(re.findall(r"<code>.*?</code>", body, re.S)))
            for name in sorted({self.known(match[0]) for match in EXPRESSION.finditer(code)} - {None}):
                self.name(name, address)

    def known(self, text):
        """The public name at the start of an expression, or None."""
        match = EXPRESSION.match(text.removeprefix("chorale::"))
        if not match:
            return None
        if match["member"]:
            types = OBJECTS.get(match["object"], [])
            return next((name for type_ in types if (name := f"{type_}::{match['member']}") in self.names), None)
        name = match["name"]
        if name in self.names:
            return name
        # Without its namespace, where it is like no other: PowerSgd, quantize_per_channel_hook.
        whole = self.by_last_part.get(name, ()) if re.search(r"[a-z][A-Z]|\w_\w", name) else ()
        return whole[0] if len(whole) == 1 else None

    def linked(self, match, address):
        text = html.unescape(match[1])
        name = self.known(text)
        if OWN.match(text) and not name:
            self.wrong.append(f"{address}: there is no {OWN.match(text)[0]}")
        # A word of its own, or a call; not the first word of a command line.
        if not name or not re.match(r"[\w:.]+($|[(<{.])", text):
            return match[0]
        return f'<a href="{relative(address, self.names[name][0])}">{match[0]}</a>'

    def write(self, folder, sections):
        """sections: [(heading, [(title, address)])] of the navigation."""
        if folder.exists():
            shutil.rmtree(folder)
        for address, (title, _, body) in self.pages.items():
            path = folder / address
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.frame(address, title, body, sections))
        entries = [[name, places[0], "name", ""] for name, places in self.names.items() if "#" in places[0]]
        entries += [[title, address, kind, markup.plain(body)[:20000]]
                    for address, (title, kind, body) in self.pages.items() if kind != "index"]
        (folder / "search_index.js").write_text(
            "window.CHORALE_INDEX = " + json.dumps(entries, ensure_ascii=False, separators=(",", ":")) + ";\n")
        for name in ("search.js", "site.css"):
            shutil.copy(FILES / name, folder / name)
        return self.wrong + links.broken(folder)

    def frame(self, address, title, body, sections):
        root = relative(address, "")
        menu = "".join(f"<b>{heading}</b>" + "".join(
            f'<a href="{relative(address, target)}">{html.escape(text)}</a>' for text, target in entries)
            for heading, entries in sections)
        return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)} · Chorale</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="{root}site.css">
</head>
<body data-root="{root}">
<header><a href="{root}index.html">Chorale</a><input id="search" type="search" placeholder="Search (press /)" aria-label="Search" autocomplete="off"></header>
<div id="results" hidden></div>
<div class="columns">
<nav><input id="menu" type="checkbox" hidden><label for="menu">☰ All pages</label><div>{menu}</div></nav>
<main>
{body}
</main>
</div>
<script src="{root}search_index.js"></script>
<script src="{root}search.js"></script>
</body>
</html>
"""


def relative(page, target):
    """The link from one address of the site to another, or to its root."""
    target, _, fragment = target.partition("#")
    up = "../" * page.count("/")
    if not target:
        return (up or "./") + (f"#{fragment}" if fragment else "")
    path = os.path.relpath(target, pathlib.PurePosixPath(page).parent)
    return path + (f"#{fragment}" if fragment else "")
