"""Text to HTML: Markdown pages, C++ with colours, and names that become links."""
import html
import re

import markdown

CPP = re.compile(
    r"(?P<comment>//[^\n]*|<!--.*?-->)|(?P<string>\"(?:\\.|[^\"\\\n])*\")|(?P<number>\b\d[\w.']*)|"
    r"(?P<keyword>\b(?:auto|bool|break|case|catch|char|class|const|constexpr|continue|default|double|else|enum|explicit|extern|"
    r"false|float|for|friend|if|inline|int|int32_t|int64_t|namespace|new|noexcept|nullptr|operator|override|private|protected|"
    r"public|return|size_t|static|struct|switch|template|this|throw|true|try|typename|uint64_t|uint8_t|using|virtual|void|while)\b)"
    r"|(?P<directive>^#\w+)", re.M)
# What the label above a fenced block says.
LABELS = {"output": "prints", "error": "fails with"}


def highlight(code):
    out, at = [], 0
    for match in CPP.finditer(code):
        out += [html.escape(code[at : match.start()]), f'<span class="{match.lastgroup}">{html.escape(match[0])}</span>']
        at = match.end()
    return "".join(out) + html.escape(code[at:])


def cpp(code):
    return f'<pre class="cpp"><code>{highlight(code)}</code></pre>'


def pre(text):
    return f"<pre><code>{html.escape(text)}</code></pre>"


def prose(comment):
    """A comment of a header: paragraphs, lists (lines that begin with a dash), and indented parts as code."""
    parts = []  # (kind, lines)
    for line in comment.strip("\n").splitlines():
        before = parts[-1][0] if parts else None
        if not line.strip():
            kind = None
        elif line.startswith("- "):
            kind = "item"
        elif before == "item" and line.startswith("  "):
            kind, line = "more", line.strip()
        else:
            kind = "code" if line.startswith("  ") else "text"
        if kind == "more" or (kind and kind == before and kind != "item"):
            parts[-1][1].append(line)
        else:
            parts.append((kind, [line]))
    out = []
    for kind, lines in parts:
        if kind == "code":
            out.append(cpp("\n".join(lines)))
        elif kind:
            text = html.escape(" ".join(line.strip() for line in lines), quote=False)
            text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
            out.append(f"<ul><li>{text[2:]}</li></ul>" if kind == "item" else f"<p>{text}</p>")
    return "\n".join(out).replace("</ul>\n<ul>", "\n")


def page(text):
    """A Markdown page: (title, HTML). Comments, which are for tests, disappear."""
    text = re.sub(r"^<!--.*?-->\n", "", text, flags=re.S | re.M)
    blocks = []

    def keep(match):
        language, code = match[1], match[2].rstrip("\n")
        if language in LABELS:
            blocks.append(f'<div class="label">{LABELS[language]}</div>' + pre(code).replace("<pre>", '<pre class="said">'))
        else:
            blocks.append(cpp(code) if language == "cpp" else pre(code))
        return f"\n\nBLOCK{len(blocks) - 1}BLOCK\n\n"

    text = re.sub(r"^```(\w*)\n(.*?)^```$", keep, text, flags=re.S | re.M)
    body = markdown.markdown(text, extensions=["tables", "toc", "sane_lists"])
    body = re.sub(r"<p>BLOCK(\d+)BLOCK</p>", lambda match: blocks[int(match[1])], body)
    body = re.sub(r"<thead>\s*<tr>\s*(?:<th></th>\s*)+</tr>\s*</thead>", "", body)
    body = body.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
    title = re.search(r"<h1[^>]*>(.*?)</h1>", body, re.S)
    return re.sub(r"<[^>]+>", "", title[1]) if title else "", body


def plain(body):
    """What a reader sees of HTML, for searching."""
    body = re.sub(r"</?(?:span|code|a|b|i|em|strong)\b[^>]*>", "", body)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", body))).strip()
