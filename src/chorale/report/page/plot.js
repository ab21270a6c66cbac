// Plots as SVG. Nothing here knows what a run is.

// An HTML element: make("p", {class: "note"}, "text", element, …). Text is never read as HTML.
function make(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}
function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}
function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null) element.setAttribute(key, value);
  }
  element.append(...children.flat().filter(child => child !== null && child !== undefined));
  return element;
}

const isNumber = value => typeof value === "number" && Number.isFinite(value);

// 1234567 → "1,234,567", 0.0012345 → "0.001235": four digits that count, and no more.
function pretty(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toString().replace(/\B(?=(\d{3})+$)/g, ",");
  if (size !== 0 && size < 1e-3) return value.toExponential(2).replace("e-", "e−");
  return String(Number(value.toPrecision(4)));
}
// Seconds as people say them.
function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  const s = Math.round(seconds);
  if (s < 60) return s < 10 ? `${Number(seconds.toFixed(1))} s` : `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  return `${Math.floor(s / 3600)} h ${Math.floor(s % 3600 / 60)} min`;
}
// Short, for the marks of an axis.
function short(value) {
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= unit) return Number((value / (letter === "k" ? 1e3 : unit)).toPrecision(3)) + letter;
  }
  return pretty(value);
}

// Round numbers from low to high, about `count` of them.
function ticks(low, high, count) {
  const rough = (high - low) / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find(k => k * power >= rough * 0.999);
  const marks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; ++k) marks.push(k * step);
  return marks;
}
function logTicks(low, high) {
  const few = Math.log10(high / low) < 2.2;
  const marks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); ++power) {
    for (const k of few ? [1, 2, 5] : [1]) {
      const mark = k * 10 ** power;
      if (mark >= low * 0.999 && mark <= high * 1.001) marks.push(mark);
    }
  }
  return marks.length > 1 ? marks : [low, high];
}

function quantile(sorted, share) {
  return sorted[Math.min(sorted.length - 1, Math.max(0, Math.round(share * (sorted.length - 1))))];
}

// What the vertical axis shows: all of it, but a few wild values must not flatten the rest.
function verticalRange(series, {log, low, high}) {
  const values = series.flatMap(one => one.y).filter(y => isNumber(y) && (!log || y > 0)).sort((a, b) => a - b);
  if (values.length === 0) return null;
  let [bottom, top] = [values[0], values[values.length - 1]];
  const wild = quantile(values, 0.98);
  if (values.length > 50 && top > wild + 3 * (wild - bottom)) top = wild + 0.5 * (wild - bottom);
  if (log) return bottom === top ? [bottom / 2, top * 2] : [bottom, top];
  const margin = bottom === top ? Math.abs(top) * 0.1 || 1 : (top - bottom) * 0.06;
  return [low !== undefined ? Math.min(low, bottom) : bottom - margin, high !== undefined ? Math.max(high, top) : top + margin];
}

function pathOf(xs, ys) {
  let path = "", open = false;
  for (let i = 0; i < xs.length; ++i) {
    if (!isNumber(xs[i]) || !isNumber(ys[i])) {
      open = false;
      continue;
    }
    path += `${open ? "L" : "M"}${xs[i].toFixed(1)} ${ys[i].toFixed(1)}`;
    open = true;
  }
  return path;
}

// A plot of curves.
//   series: [{name, color: 0…7, x, y, low, high, style: "faint" | "dashed", dots, quiet: not in the legend}]
//   options: {label: of the plot, xFormat, yFormat, log, low, high: bounds that the vertical axis includes}
function linePlot(series, options) {
  const figure = make("figure", {class: "plot", role: "img", "aria-label": options.label});
  const named = series.filter(one => !one.quiet);
  const legend = make("div", {class: "legend"}, named.map(one =>
    make("span", {class: `s${one.color}`}, make("i", {class: one.style ?? ""}), one.name)));
  return drawnToFit(figure, width => [...(named.length > 1 ? [legend] : []), ...drawLines(series, options, width)]);
}

// An element whose content is drawn for its width, and anew whenever that changes: text keeps its size on a phone.
function drawnToFit(element, draw) {
  let width = 0;
  new ResizeObserver(() => {
    if (element.clientWidth === width || element.clientWidth === 0) return;
    width = element.clientWidth;
    element.replaceChildren(...draw(width));
  }).observe(element);
  return element;
}

function drawLines(series, options, width) {
  const height = Math.round(Math.min(260, Math.max(190, width * 0.5)));
  const frame = {left: 50, right: width - 10, top: 8, bottom: height - 24};
  const yRange = verticalRange(series, options);
  const xs = series.flatMap(one => one.x).filter(isNumber);
  const picture = svg("svg", {width, height, viewBox: `0 0 ${width} ${height}`});
  if (!yRange || xs.length === 0) {
    picture.append(svg("text", {x: width / 2, y: height / 2, "text-anchor": "middle"}, "nothing yet"));
    return [picture];
  }
  const xRange = [xs.reduce((a, b) => Math.min(a, b)), xs.reduce((a, b) => Math.max(a, b))];
  if (xRange[0] === xRange[1]) xRange[1] += 1;
  const bend = options.log ? Math.log : value => value;
  const across = x => frame.left + (x - xRange[0]) / (xRange[1] - xRange[0]) * (frame.right - frame.left);
  const up = y => {
    if (!isNumber(y) || (options.log && y <= 0)) return NaN;
    return frame.bottom - (bend(y) - bend(yRange[0])) / (bend(yRange[1]) - bend(yRange[0])) * (frame.bottom - frame.top);
  };

  const yFormat = options.yFormat ?? short, xFormat = options.xFormat ?? short;
  for (const mark of options.log ? logTicks(...yRange) : ticks(...yRange, 4)) {
    picture.append(svg("line", {class: "grid", x1: frame.left, x2: frame.right, y1: up(mark), y2: up(mark)}),
      svg("text", {x: frame.left - 7, y: up(mark) + 4, "text-anchor": "end"}, yFormat(mark)));
  }
  for (const mark of ticks(...xRange, Math.max(2, Math.floor(width / 95)))) {
    const x = across(mark);
    if (x > frame.right + 0.5) continue;
    picture.append(svg("text", {x: Math.min(x, frame.right - 8), y: height - 7, "text-anchor": "middle"}, xFormat(mark)));
  }
  picture.append(svg("line", {class: "axis", x1: frame.left, x2: frame.right, y1: frame.bottom, y2: frame.bottom}));

  // An inner picture cuts off what leaves the frame.
  const inner = svg("svg", {x: 0, y: frame.top - 3, width, height: frame.bottom - frame.top + 6,
    viewBox: `0 ${frame.top - 3} ${width} ${frame.bottom - frame.top + 6}`});
  for (const one of series) {
    const x = one.x.map(across), y = one.y.map(up);
    const group = svg("g", {class: `s${one.color}`});
    if (one.low && one.high) {
      const lows = pathOf([...x].reverse(), one.low.map(up).reverse());
      group.append(svg("path", {class: "band", d: pathOf(x, one.high.map(up)) + lows.replace("M", "L") + "Z"}));
    }
    group.append(svg("path", {class: `curve ${one.style ?? ""}`, d: pathOf(x, y)}));
    if (one.dots || x.length === 1) {
      x.forEach((_, i) => isNumber(y[i]) && group.append(svg("circle", {class: "dot", cx: x[i].toFixed(1), cy: y[i].toFixed(1), r: 3})));
    }
    inner.append(group);
  }
  const cursor = svg("line", {class: "cursor", y1: frame.top, y2: frame.bottom, visibility: "hidden"});
  picture.append(inner, cursor);

  const tip = make("div", {class: "tip", hidden: ""});
  const hide = () => {
    tip.hidden = true;
    cursor.setAttribute("visibility", "hidden");
  };
  const show = event => {
    const box = picture.getBoundingClientRect();
    const x = xRange[0] + (event.clientX - box.left - frame.left) / (frame.right - frame.left) * (xRange[1] - xRange[0]);
    const lines = series.filter(one => one.style !== "faint").map(one => ({one, i: nearest(one.x, x)})).filter(({one, i}) => i >= 0 && isNumber(one.y[i]));
    if (lines.length === 0) return hide();
    // Of the curves, the point next to the pointer is the one spoken of.
    const at = lines.map(({one, i}) => one.x[i]).reduce((a, b) => Math.abs(a - x) < Math.abs(b - x) ? a : b);
    tip.replaceChildren(make("div", {}, (options.xTip ?? xFormat)(at)), ...lines.map(({one, i}) =>
      make("div", {class: `s${one.color}`}, make("i"), `${named(one)}${(options.yTip ?? pretty)(one.y[i])}`)));
    tip.hidden = false;
    cursor.setAttribute("visibility", "visible");
    cursor.setAttribute("x1", across(at));
    cursor.setAttribute("x2", across(at));
    const left = across(at) + 12;
    tip.style.left = `${left + tip.offsetWidth > width ? Math.max(0, across(at) - 12 - tip.offsetWidth) : left}px`;
  };
  const named = one => series.length > 1 ? `${one.name}: ` : "";
  picture.addEventListener("pointermove", show);
  picture.addEventListener("pointerdown", show);
  picture.addEventListener("pointerleave", hide);
  return [picture, tip];
}

// The index of the value nearest to x in a rising list, or -1.
function nearest(list, x) {
  let low = 0, high = list.length - 1;
  if (high < 0) return -1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (list[middle] <= x) low = middle; else high = middle;
  }
  return Math.abs(list[low] - x) <= Math.abs(list[high] - x) ? low : high;
}

// Horizontal bars: rows of {label, value: text, parts: [{from, to, color, hatched, title}]}, all on one scale.
function barPlot(rows, label) {
  const most = Math.max(...rows.flatMap(row => row.parts.map(part => part.to)), 1e-9);
  const percent = value => `${(100 * value / most).toFixed(3)}%`;
  return make("figure", {class: "bars", role: "img", "aria-label": label}, rows.map(row => [
    make("span", {}, row.label),
    svg("svg", {}, row.parts.map(part => bar(part, percent))),
    make("span", {class: "value"}, row.value),
  ]).flat());
}
function bar(part, percent) {
  const box = {x: percent(part.from), y: 1, width: percent(Math.max(0, part.to - part.from)), height: 16};
  const group = svg("g", {class: `s${part.color}`}, svg("title", {}, part.title));
  if (!part.hatched) {
    group.append(svg("rect", {...box, rx: 2}));
    return group;
  }
  // Striped: it happens at the same time as what it lies on.
  group.append(svg("rect", {...box, rx: 2}), svg("rect", {...box, rx: 2, class: "stripes"}));
  return group;
}
