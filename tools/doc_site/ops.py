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
    """{name: (text of the row, path)}: a row begins with `constexpr OpDef k…` at the margin and ends with }; or });."""
    found = {}
    for path in sorted((root / "src/chorale/op/defs").glob("*.cc")):
        for text in re.findall(r"^(?:constexpr|const) OpDef k\w+.*?^\}\)?;$", path.read_text(), re.S | re.M):
            name = re.search(r'\.name = "(\w+)"', text)
            if name:
                found[name[1]] = (text, path.relative_to(root).as_posix())
    return found


def function_name(op, functions):
    """The function that users call for a row: add for add_scalar; None for rows of gradients and the like."""
    for name in (op, re.sub(r"_(scalar|number|tensor|fill|dims?)$", "", op), op.replace("_with_logits", "")):
        if name in functions:
            return name
    return None
