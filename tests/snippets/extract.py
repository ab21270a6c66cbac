#!/usr/bin/env python3
"""Makes C++ of the code blocks in pages, so that what pages show compiles and runs.

  extract.py OUT.cc PAGE.md...

Every ```cpp block becomes a function of its own, with `chorale::comm::Group& group` in scope; types that begin at the
left margin, and #include lines, come before the function. Around a block there may be, in this order:

  <!-- before           C++ that the block needs and the reader does not
  ...
  -->
  ```cpp
  ...
  ```
  <!-- check            C++ behind it: CHECK(x.size(0) == 3);
  ...
  -->
  ```output             what it prints; … stands for anything
  ```
  ```error              what the exception that it throws says
  ```

A block with a main() is left out: tests/readme_test.py compares those with the examples. So is one behind
<!-- not compiled: REASON -->.
"""
import pathlib
import re
import sys

FENCE = re.compile(r"^```(\w*)$")
COMMENT = re.compile(r"^<!-- (before|check|not compiled: .+?)(?: -->)?$")


class Part:
    """A stretch of a page: a fenced block, a comment, or nothing of interest (text)."""

    def __init__(self, kind, line, text):
        self.kind, self.line, self.text = kind, line, text


def parts_of(page):
    lines = page.read_text().splitlines()
    at = 0
    while at < len(lines):
        fence, comment = FENCE.match(lines[at]), COMMENT.match(lines[at])
        start = at + 1
        if fence or (comment and not lines[at].endswith("-->")):
            end = "```" if fence else "-->"
            at = start
            while lines[at] != end:
                at += 1
                if at == len(lines):
                    raise SystemExit(f"{page}:{start}: a block without an end")
            if comment and any(line.startswith("```") for line in lines[start:at]):
                raise SystemExit(f"{page}:{start}: a comment in which there is a block; its end, -->, has a line of its own")
            yield Part((fence or comment)[1], start + 1, "\n".join(lines[start:at]))
        elif comment:
            yield Part(comment[1].split(":")[0], start, "")
        elif lines[at]:
            yield Part("text", start, lines[at])
        at += 1


def split_types(code):
    """The code with blank lines for includes and types at the left margin, and those with blank lines for the rest."""
    types, body, inside = [], [], False
    for line in code.splitlines():
        starts = re.match(r"(struct|class|template) ?", line)
        if inside or starts or re.match(r"#include|using namespace", line):
            types.append(line)
            body.append("")
            inside = (inside or bool(starts)) and not re.match(r"\};", line) and not (starts and line.endswith("};"))
        else:
            types.append("")
            body.append(line)
    return "\n".join(types), "\n".join(body)


def quoted(text):
    return "nullptr" if text is None else "R\"page(" + text + ")page\""


def render(page, number, block, before, check, output, error):
    name = f"{page.stem}_{number}"
    text = [f"namespace {name} {{", "using namespace chorale;", "using namespace std::chrono_literals;"]
    body = []
    for part in (before, block, check):
        if part:
            types, statements = split_types(part.text)
            where = f'#line {part.line} "{page}"'
            text += [where, types]
            body += [where, statements]
    text += ["void run([[maybe_unused]] comm::Group& group) {"] + body + ["}"]
    text += [f'const int added = snippets::add({{"{page}:{block.line}", run, {quoted(output)}, {quoted(error)}}});', "}"]
    return "\n".join(text)


def snippets_of(page):
    parts = list(parts_of(page))
    for i, part in enumerate(parts):
        previous = parts[i - 1] if i else None
        if part.kind != "cpp" or re.search(r"\bint main\(", part.text) or (previous and previous.kind == "not compiled"):
            continue
        before = previous if previous and previous.kind == "before" else None
        following = {}
        for other in parts[i + 1 : i + 3]:
            if other.kind not in ("check", "output", "error"):
                break
            following[other.kind] = other
        texts = {kind: other.text for kind, other in following.items()}
        yield render(page, i, part, before, following.get("check"), texts.get("output"), texts.get("error"))


def main():
    out, pages = pathlib.Path(sys.argv[1]), [pathlib.Path(name) for name in sys.argv[2:]]
    snippets = [snippet for page in pages for snippet in snippets_of(page)]
    out.write_text('#include "tests/snippets/snippets.h"\n\n' + "\n\n".join(snippets) + "\n")


if __name__ == "__main__":
    main()
