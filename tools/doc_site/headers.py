"""What the public headers declare, and what their comments say, from libclang and the text itself.

A comment belongs to the functions right below it, up to the next blank line; to the type or member below it; or to what is on
its line. The names of kinds are those of a reader: function, class, enum, alias, constant, field.
"""
import pathlib
import re

import clang.cindex as clang

KINDS = {
    clang.CursorKind.FUNCTION_DECL: "function",
    clang.CursorKind.FUNCTION_TEMPLATE: "function",
    clang.CursorKind.STRUCT_DECL: "class",
    clang.CursorKind.CLASS_DECL: "class",
    clang.CursorKind.CLASS_TEMPLATE: "class",
    clang.CursorKind.ENUM_DECL: "enum",
    clang.CursorKind.TYPE_ALIAS_DECL: "alias",
    clang.CursorKind.TYPE_ALIAS_TEMPLATE_DECL: "alias",
    clang.CursorKind.TYPEDEF_DECL: "alias",
    clang.CursorKind.VAR_DECL: "constant",
    clang.CursorKind.CXX_METHOD: "function",
    clang.CursorKind.CONSTRUCTOR: "function",
    clang.CursorKind.FIELD_DECL: "field",
}
# Reached by chorale.h, but nobody's business.
PRIVATE = re.compile(r"^chorale/(vec/|transport/shm/|comm/(engine|operation)\.h|kernel/(view|kernel_args|attrs)\.h|base/pool\.h)")
WRITTEN_BY_MACROS = ("visit_members", "type_name", "describe", "for_each_tensor", "attrs_type")
NOT_PUBLIC = (clang.AccessSpecifier.PRIVATE, clang.AccessSpecifier.PROTECTED)


class Entity:
    """One declared name. `members` are the public ones of a class, or the values of an enum (as names only)."""

    def __init__(self, kind, name, scope, header, line, text, comment):
        self.kind, self.name, self.scope, self.header, self.line = kind, name, scope, header, line
        self.text, self.comment = text, comment
        self.members, self.bases, self.values = [], [], []

    @property
    def qualified(self):
        """nn::Linear: as users write it behind `using namespace chorale`."""
        return "::".join([*self.scope, self.name])


class Header:
    def __init__(self, path, text):
        self.path, self.lines, self.entities = path, text.splitlines(), []
        self.borrowed = []  # (parallel::join, reducer::join) for `using reducer::join;` in namespace parallel
        self.comment = block_comment(self.lines, len(self.lines) and next(
            (i for i, line in enumerate(self.lines) if not line.startswith("//")), 0))


def uncommented(line):
    return re.sub(r"^\s*// ?", "", line)


def block_comment(lines, end):
    """The text of the comment lines that end above lines[end]."""
    start = end
    while start > 0 and re.match(r"\s*//", lines[start - 1]) and not re.match(r"\s*// ----", lines[start - 1]):
        start -= 1
    return "\n".join(uncommented(line) for line in lines[start:end]).replace("NOLINT", "")


def comment_of(lines, first, last, shares):
    """Of the declaration in lines[first..last]. One that `shares` may stand further below the comment of its group."""
    trailing = re.search(r"[;{},)]\s*// ?(.*)$", lines[last]) or re.search(r"[;{},)]\s*// ?(.*)$", lines[first])
    at = first
    while shares and at > 0 and re.match(r"\s*\S", lines[at - 1]) and not re.match(r"\s*//|\s*(public|protected|private):|.*[{]$|#|\s*}", lines[at - 1]):
        at -= 1
    above = block_comment(lines, at)
    text = trailing[1] if trailing and not trailing[1].startswith("NOLINT") else ""
    return "\n".join(part for part in (above, text) if part)


def declaration(lines, cursor):
    """The declaration as it stands in the header, without a body."""
    start, end = cursor.extent.start, cursor.extent.end
    first = lines[start.line - 1]
    forms = re.match(r"\s*CHORALE_FORMS\((\w+), (.*)\)(?:\s*//.*)?$", first)
    if forms:
        if cursor.spelling.endswith("_out"):
            return f"const Tensor& {cursor.spelling}(const Tensor& out, {forms[2]});"
        return f"{'const Tensor&' if cursor.spelling.endswith('_') else 'Tensor'} {cursor.spelling}({forms[2]});"
    text = "\n".join(lines[start.line - 1 : end.line])[start.column - 1 :]
    if cursor.kind in (clang.CursorKind.STRUCT_DECL, clang.CursorKind.CLASS_DECL, clang.CursorKind.CLASS_TEMPLATE):
        return text[: text.index("{")].strip() if "{" in text else text
    if cursor.kind in (clang.CursorKind.FIELD_DECL, clang.CursorKind.VAR_DECL, clang.CursorKind.ENUM_DECL):
        return text.split(";")[0] + ";"
    # Up to the parenthesis that closes the parameters, and what stands behind it: const, -> T.
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter in "(") - (letter in ")")
        if depth == 0 and letter in "{;" or (depth == 0 and text[i : i + 3] == " : "):
            text = text[:i]
            break
    return re.sub(r"\n\s+", "\n    ", re.sub(r"\s*//[^\n]*", "", text)).strip().rstrip(";") + ";"


def entity_of(cursor, header, scope, inside=False):
    line = cursor.extent.start.line
    lines = header.lines
    last = cursor.extent.end.line if KINDS[cursor.kind] != "class" else line
    entity = Entity(KINDS[cursor.kind], cursor.spelling.split("<")[0], scope, header.path, line, declaration(lines, cursor),
                    comment_of(lines, line - 1, min(last, len(lines)) - 1, KINDS[cursor.kind] == "function" and not inside))
    for child in children(cursor):
        kind = KINDS.get(child.kind)
        if child.kind == clang.CursorKind.ENUM_CONSTANT_DECL:
            entity.values.append(child.spelling)
        elif child.kind == clang.CursorKind.CXX_BASE_SPECIFIER:
            entity.bases.append(child.type.spelling.replace("class ", "").replace("struct ", ""))
        elif entity.kind == "class" and kind and child.access_specifier not in NOT_PUBLIC and documented(child):
            if "operator" not in child.spelling or child.spelling == "operator()":
                entity.members.append(entity_of(child, header, [*scope, entity.name], inside=True))
    entity.members = merged(entity.members)
    return entity


def merged(entities):
    """Overloads become one entry, at the place of the first, so that a name has one place in a page."""
    found = {}
    for entity in entities:
        first = found.setdefault((entity.kind == "function", entity.qualified), entity)
        if first is not entity:
            first.text += "\n" + entity.text
            first.comment = "\n\n".join(dict.fromkeys(text for text in (first.comment, entity.comment) if text))
    return list(found.values())


def documented(cursor):
    if not cursor.spelling or cursor.spelling.startswith(("(", "~")) or cursor.spelling in WRITTEN_BY_MACROS:
        return False
    if cursor.kind in (clang.CursorKind.STRUCT_DECL, clang.CursorKind.CLASS_DECL, clang.CursorKind.CLASS_TEMPLATE,
                clang.CursorKind.ENUM_DECL):
        return cursor.is_definition()
    # Copying and moving go without saying.
    return not (cursor.kind == clang.CursorKind.CONSTRUCTOR and (cursor.is_copy_constructor() or cursor.is_move_constructor()))


def children(cursor):
    for child in cursor.get_children():
        try:
            child.kind
        except ValueError:  # concepts, which these bindings do not know
            continue
        yield child


def read(root):
    """{path: Header} of all public headers, in the order of their paths."""
    source = root / "src"
    unit = clang.Index.create().parse(
        str(source / "chorale/chorale.h"), args=["-xc++", "-std=c++20", f"-I{source}"],
        options=clang.TranslationUnit.PARSE_SKIP_FUNCTION_BODIES | clang.TranslationUnit.PARSE_INCOMPLETE)
    wrong = [str(note) for note in unit.diagnostics if note.severity >= clang.Diagnostic.Error]
    if wrong:
        raise SystemExit("clang does not take the headers:\n" + "\n".join(wrong))
    headers = {}
    for path in [source / "chorale/chorale.h", *(pathlib.Path(include.include.name) for include in unit.get_includes())]:
        if path.is_relative_to(source) and not PRIVATE.match(name := path.relative_to(source).as_posix()):
            headers.setdefault(name, Header(name, path.read_text()))

    def walk(cursor, scope):
        for child in children(cursor):
            file = child.location.file
            if file is None or not file.name.startswith(str(source)):
                continue
            name = pathlib.Path(file.name).relative_to(source).as_posix()
            if child.kind == clang.CursorKind.NAMESPACE:
                if child.spelling not in ("detail", "std", "") and (scope or child.spelling == "chorale"):
                    walk(child, [*scope, child.spelling])
            elif scope and name in headers and child.kind == clang.CursorKind.USING_DECLARATION:
                using = re.match(r"\s*using ([\w:]+);", headers[name].lines[child.location.line - 1])
                if using:
                    headers[name].borrowed.append(("::".join([*scope[1:], using[1].rpartition("::")[2]]), using[1]))
            elif scope and name in headers and child.kind in KINDS and documented(child):
                rows = scope[1:] == ["op"] and child.kind == clang.CursorKind.VAR_DECL  # they have pages of their own
                if "operator" not in child.spelling and not rows:
                    headers[name].entities.append(entity_of(child, headers[name], scope[1:]))

    walk(unit.cursor, [])
    for header in headers.values():
        header.entities = merged(header.entities)
    return dict(sorted(headers.items()))


def derives_from_module(entity, by_name):
    for base in entity.bases:
        name = base.removeprefix("chorale::")
        if name in ("nn::Module", "Module"):
            return True
        known = by_name.get(name) or by_name.get("nn::" + name)
        if known and derives_from_module(known, by_name):
            return True
    return False
