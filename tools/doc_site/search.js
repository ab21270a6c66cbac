// Full-text search over window.CHORALE_INDEX: [title, address, kind, text], made by tools/docs. Every word must occur; what
// is in a title counts more than what is in the text.
"use strict";
(() => {
  const box = document.getElementById("search");
  const list = document.getElementById("results");
  const root = document.body.dataset.root;

  function score(entry, words) {
    const title = entry[0].toLowerCase();
    const text = entry[3].toLowerCase();
    let total = entry[2] === "guide" ? 2 : 0;
    for (const word of words) {
      if (title === word || title.endsWith("::" + word)) total += 100;
      else if (title.startsWith(word) || title.includes("::" + word)) total += 30;
      else if (title.includes(word)) total += 15;
      else if (text.includes(word)) total += 1 + Math.min(5, text.split(word).length - 1);
      else return 0;
    }
    return total;
  }

  function excerpt(text, word) {
    const at = Math.max(0, text.toLowerCase().indexOf(word) - 50);
    return (at > 0 ? "…" : "") + text.slice(at, at + 160) + (at + 160 < text.length ? "…" : "");
  }

  function show() {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    list.replaceChildren();
    list.hidden = words.length === 0;
    if (list.hidden) return;
    const found = window.CHORALE_INDEX.map((entry) => [score(entry, words), entry])
      .filter((pair) => pair[0] > 0)
      .sort((a, b) => b[0] - a[0])
      .slice(0, 30);
    for (const [, entry] of found) {
      const link = document.createElement("a");
      link.href = root + entry[1];
      const name = document.createElement("b");
      name.textContent = entry[0];
      const kind = document.createElement("i");
      kind.textContent = entry[2];
      const text = document.createElement("span");
      text.textContent = excerpt(entry[3], words[0]);
      link.append(name, " ", kind, text);
      list.append(link);
    }
    if (found.length === 0) list.append("nothing found");
  }

  box.addEventListener("input", show);
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter") list.querySelector("a")?.click();
    if (event.key === "Escape") {
      box.value = "";
      show();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && document.activeElement !== box) {
      event.preventDefault();
      box.focus();
    }
  });
  // A link may carry words to look for: index.html?q=matmul
  const asked = new URLSearchParams(location.search).get("q");
  if (asked) {
    box.value = asked;
    show();
  }
})();
