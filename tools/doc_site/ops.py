"""The op table as `chorale ops --json` prints it, with each row's own source."""
import json
import re
import subprocess


def read(program, root):
    """The rows, by name: {"facts": …, "examples": …, "source": text, "file": path}."""
    rows = json.loads(subprocess.run([str(program), "ops", "--json"], check=True, stdout=subprocess.PIPE).stdout)
    sources = row_sources(root)
    table = {}
    for row in rows:
        row["source"], row["file"] = sources.get(row["name"], ("", ""))
        table[row["name"]] = row
    return table


def row_sources(root):
    """{name: (text of the row, path)}: a row is a constant `OpDef k…` at the margin with the indented lines that follow."""
    row = re.compile(r"^(?:constinit )?const(?:expr)? OpDef k\w+.*(?:\n(?:[ }].*)?(?=\n))*", re.M)
    found = {}
    for path in sorted((root / "src/chorale/op/defs").glob("*.cc")):
        for text in row.findall(path.read_text()):
            name = re.search(r'"(\w+)"', text)
            if name:
                found[name[1]] = (text.rstrip(), path.relative_to(root).as_posix())
    return found


def function_name(op, functions):
    """The function that users call for a row: add for add_scalar; None for rows of gradients and the like."""
    for name in (op, re.sub(r"_(scalar|number|tensor|fill|dims?)$", "", op), op.replace("_with_logits", "")):
        if name in functions:
            return name
    return None
