"""Every link of the site leads somewhere, and nothing is asked of another server."""
import html.parser
import os
import pathlib
import urllib.parse


class Page(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.links, self.anchors, self.loads = [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        if "id" in values:
            self.anchors.add(values["id"])
        if tag == "a" and values.get("href") is not None:
            self.links.append(values["href"])
        for name in ("src", "srcset", "data", "poster", "action"):
            if values.get(name):
                self.loads.append(values[name])
        if tag == "link":
            self.loads.append(values.get("href") or "")


def broken(folder):
    """One line for each link or file that is not there."""
    pages = {path: Page(path.read_text()) for path in sorted(pathlib.Path(folder).rglob("*.html"))}
    wrong = []
    for path, page in pages.items():
        name = path.relative_to(folder)
        for target in page.links + page.loads:
            parts = urllib.parse.urlsplit(target)
            if parts.scheme or parts.netloc:
                if target in page.loads and parts.scheme != "data":
                    wrong.append(f"{name}: loads {target} from elsewhere")
                continue
            other = pathlib.Path(os.path.normpath(path.parent / urllib.parse.unquote(parts.path))) if parts.path else path
            if not other.is_file():
                wrong.append(f"{name}: {target} is not there")
            elif parts.fragment and other in pages and urllib.parse.unquote(parts.fragment) not in pages[other].anchors:
                wrong.append(f"{name}: {target}: no such place in that page")
    return wrong
