"""Pages of the reference: one for each header, each module (a class derived from nn::Module) and each op."""
import html
import re
import textwrap

import headers as header_files
import markup
import ops as op_table
from site_pages import relative

TORCH_MODULES = "Names, defaults and numbers are those of PyTorch's module of the same name."


def slug(text):
    return re.sub(r"\W+", "-", text).strip("-")


def header_address(path):
    return "api/" + path.removeprefix("chorale/").removesuffix(".h").replace("/", "-") + ".html"


def render(entity, level):
    """An entity with its comment; of a class, its public members behind it."""
    anchor = slug(entity.qualified)
    text = entity.text
    if entity.kind == "class":
        fields = [member for member in entity.members if member.kind == "field"]
        if fields and len(fields) == len(entity.members):  # a struct of options: the code says it best
            text = "\n".join([text + " {", *(line for field in fields for line in field_lines(field)), "};"])
            rest = ""
        else:
            rest = "\n".join(render(member, level + 1) for member in entity.members)
    else:
        rest = ""
    heading = f'<h{level} id="{anchor}">{html.escape(entity.qualified)}</h{level}>' if level < 3 else ""
    name = f'<div class="member" id="{anchor}">' if level >= 3 else '<div class="member">'
    return f"{heading}{name}{markup.cpp(text)}{markup.prose(entity.comment)}{rest}</div>"


def field_lines(field):
    """A field with its comment behind it, or above it where that would be too long."""
    comment = " ".join(field.comment.split())
    if not comment:
        return [f"  {field.text}"]
    if len(field.text) + len(comment) < 90:
        return [f"  {field.text}  // {comment}"]
    return [f"  // {line}" for line in textwrap.wrap(comment, 90)] + [f"  {field.text}"]


def add_headers(site, headers):
    for path, header in headers.items():
        address = header_address(path)
        for entity in header.entities:
            place = f"{address}#{slug(entity.qualified)}"
            site.name(entity.qualified, place)
            for value in entity.values:
                site.name(f"{entity.qualified}::{value}", place)
            for member in entity.members:
                if member.name != entity.name:
                    site.name(member.qualified, place if is_options(entity) else f"{address}#{slug(member.qualified)}")
        body = "\n".join(render(entity, 2) for entity in header.entities)
        if not header.entities and not header.comment:
            continue
        title = path
        site.add(address, title, "header", f'<h1>{path}</h1><p><code>#include "{path}"</code></p>'
                 f"{markup.prose(header.comment)}{body}")
    for name, whose in (row for header in headers.values() for row in header.borrowed):
        for known in [known for known in site.names if known == whose or known.startswith(whose + "::")]:
            for place in site.names[known]:
                site.name(name + known.removeprefix(whose), place)


def is_options(entity):
    return bool(entity.members) and all(member.kind == "field" for member in entity.members)


def add_modules(site, headers):
    """Returns [(name, address)]."""
    by_name = {entity.qualified: entity for header in headers.values() for entity in header.entities if entity.kind == "class"}
    found = []
    for entity in by_name.values():
        if not header_files.derives_from_module(entity, by_name) or entity.name.endswith("Base"):
            continue
        address = f"modules/{slug(entity.qualified)}.html"
        own = with_inherited(entity, by_name)
        constructors = [m for m in entity.members if m.name == entity.name]
        forward = [m for m in own if m.name == "forward"]
        state = [m for m in own if m.kind == "field"]
        others = [m for m in own if m not in constructors + forward + state and m.kind == "function"]
        body = [f"<h1>{entity.qualified}</h1>", markup.prose(entity.comment)]
        reference = relative(address, header_address(entity.header) + "#" + slug(entity.qualified))
        body.append(f'<p class="soft">Declared in <a href="{reference}">{entity.header}</a>'
                    f'{"; derived from " + html.escape(", ".join(b.removeprefix("chorale::") for b in entity.bases))}.</p>')
        if entity.scope == ["nn"]:
            body.append(f'<p class="soft">{TORCH_MODULES}</p>')
        for title, members in (("Construction", constructors), ("Forward", forward), ("Parameters, buffers and members", state),
                               ("Further", others)):
            if members:
                body.append(f'<h2 id="{slug(title)}">{title}</h2>' + "".join(
                    f'<div class="member">{markup.cpp(m.text)}{markup.prose(m.comment)}</div>' for m in members))
        options = {name for m in constructors for name in re.findall(r"\b(\w+Options)\b", m.text)}
        for name in sorted(options):
            struct = by_name.get("::".join([*entity.scope, name]))
            if struct:
                body.append(f'<h2 id="{name}">{name}</h2>' + render(struct, 3))
        site.add(address, entity.qualified, "module", "\n".join(body))
        site.names[entity.qualified] = [address, *site.names.get(entity.qualified, [])]
        found.append((entity.qualified, address))
    return sorted(found, key=lambda item: item[0].lower())


def with_inherited(entity, by_name):
    """Public members, with those of its bases below nn::Module, which every module has."""
    members = list(entity.members)
    for base in entity.bases:
        known = by_name.get(base.removeprefix("chorale::"))
        if known and known.qualified != "nn::Module":
            names = {member.name for member in members} | {known.name}
            members += [member for member in with_inherited(known, by_name) if member.name not in names]
    return members


def add_ops(site, table, headers):
    """Returns [(name, address)]."""
    functions = {}
    for header in headers.values():
        for entity in header.entities:
            if entity.kind == "function" and not entity.scope:
                functions.setdefault(entity.name, []).append(entity)
    found = []
    for name, row in table.items():
        address = f"ops/{name}.html"
        facts = row["facts"]
        body = [f"<h1>{name}</h1>", markup.pre(facts.get("expression") or facts["formula"])]
        function = op_table.function_name(name, functions)
        if function:
            forms = [e for form in (function, function + "_", function + "_out") for e in functions.get(form, [])]
            body.append('<h2 id="call">Call</h2>' + "".join(
                f'{markup.cpp(e.text)}{markup.prose(e.comment)}' for e in forms))
            links = ", ".join(f'<a href="{relative(address, header_address(p))}">{p}</a>' for p in sorted({e.header for e in forms}))
            body.append(f'<p class="soft">In {links}.</p>')
        else:
            body.append('<p class="soft">Other ops call this one, in gradients for example; there is no function of that name.</p>')
        labels = [("inputs", "Inputs"), ("results", "Results"), ("attributes", "Attributes, with defaults"),
                  ("dtypes", "Dtypes of the first input"), ("devices", "Devices"), ("gradient", "Gradient"),
                  ("saves", "Saved for the gradient"), ("sharding", "Sharding rule"), ("autocast", "Under autocast, computed in"),
                  ("notes", "Notes")]
        body.append('<h2 id="facts">Facts</h2><div class="wide"><table>' + "".join(
            f"<tr><th>{label}</th><td><code>{html.escape(facts[key])}</code></td></tr>" for key, label in labels if key in facts)
            + "</table></div>")
        body.append(examples(row))
        if row["source"]:
            body.append(f'<h2 id="row">The row</h2><p>With the gradient rule, as it stands in <code>{row["file"]}</code>.</p>'
                        + markup.cpp(row["source"]))
        site.add(address, name, "op", "\n".join(body))
        site.name(name, address)
        if function:
            site.name(function, address)
        found.append((name, address))
    return found


def examples(row):
    if not row["examples"]:
        return ""
    columns = [("inputs", lambda e: "<br>".join(t["type"] for t in e["in"]) or "–"),
               ("attributes", lambda e: html.escape(e["attributes"])),
               ("results", lambda e: "<br>".join(t["type"] for t in e["out"]))]
    columns = [(title, cell) for title, cell in columns if any(cell(e) for e in row["examples"])]
    lines = [[cell(e) for _, cell in columns] for e in row["examples"]]
    text = ('<h2 id="shapes">Shapes, by example</h2><div class="wide"><table><tr>'
            + "".join(f"<th>{title}</th>" for title, _ in columns) + "</tr>"
            + "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>" for line in lines) + "</table></div>")
    small = [e for e in row["examples"] if all("values" in t or t["type"] == "absent" for t in e["in"] + e["out"]) and e["out"]]
    if small:
        shown = min(small, key=lambda e: sum(len(t.get("values", "")) for t in e["in"] + e["out"]))
        names = [word.strip(" ?.") for word in row["facts"]["inputs"].split(",")]
        lines = [f"{names[min(i, len(names) - 1)] if e is shown['in'] else 'result'} =\n{t['values']}"
                 for e in (shown["in"], shown["out"]) for i, t in enumerate(e) if "values" in t]
        call = f"attributes {shown['attributes']}\n\n" if shown["attributes"] else ""
        text += '<h2 id="example">Example</h2>' + markup.pre(call + "\n\n".join(lines))
    return text
