// Draws the page from its data, and again when a live page gets more. A section keeps its element from one time to the
// next, so that the reader's place, choices and opened samples stay.

const page = document.getElementById("page");
const live = document.body.dataset.mode === "live";
const view = {x: "step", log: false, opened: new Set()};
let data = JSON.parse(document.getElementById("data").textContent);
let connection = live ? "connecting" : "file";

const last = list => list.length > 0 ? list[list.length - 1] : undefined;
const numbers = list => (list ?? []).filter(isNumber);
const median = list => quantile(numbers(list).sort((a, b) => a - b), 0.5);
const percent = value => isNumber(value) ? `${Number((100 * value).toFixed(2))} %` : "–";
const MOST_COLORS = 8;
const colorOf = index => index % MOST_COLORS;

// The card of a section, made on first use; `build` returns what is in it, or nothing to hide it.
function section(parent, id, wide, title, content) {
  let card = document.getElementById(id);
  if (!card) {
    card = make("section", {id, class: wide ? "card wide" : "card"});
    parent.append(card);
  }
  card.hidden = !content || content.length === 0;
  card.replaceChildren(...(card.hidden ? [] : [...(title ? [make("h2", {}, title)] : []), ...content]));
  return card;
}

// --- what is known of a run -------------------------------------------------------------------------------------

const doneSteps = run => last(run.train.step) ?? 0;
const seconds = run => last(numbers(run.train.seconds));
function bestAccuracy(run) {
  const all = numbers(run.evaluations.test_accuracy);
  return all.length > 0 ? all.reduce((a, b) => Math.max(a, b)) : undefined;
}
// A run has as many time lines of a rank as steps were sampled.
function split(series) {
  const middle = name => median(series[name]) ?? 0;
  return {compute: middle("compute_ms"), exposed: middle("exposed_ms"), hidden: middle("hidden_ms"), samples: series.step.length};
}
// The mean of the neighbours on both sides, so that a noisy curve can be read and does not lag.
function smoothed(values) {
  const reach = Math.round(values.length / 50);  // a short curve stays as it is
  const sums = [0], counts = [0];
  for (const value of values) {
    sums.push(last(sums) + (isNumber(value) ? value : 0));
    counts.push(last(counts) + (isNumber(value) ? 1 : 0));
  }
  return values.map((value, i) => {
    const near = Math.min(reach, i, values.length - 1 - i);
    const count = counts[i + near + 1] - counts[i - near];
    return isNumber(value) && count > 0 ? (sums[i + near + 1] - sums[i - near]) / count : null;
  });
}
// Of the last fiftieth of a run: one step says little.
function lastLoss(run) {
  const losses = numbers(run.train.loss);
  const recent = losses.slice(-Math.max(1, Math.round(losses.length / 50)));
  return recent.length > 0 ? recent.reduce((a, b) => a + b) / recent.length : undefined;
}

// Where lines of metrics are on the horizontal axis.
const place = series => view.x === "step" ? series.step : series.seconds.map(seconds => seconds ?? NaN);

// --- sections ---------------------------------------------------------------------------------------------------

function head(runs) {
  const title = runs.length === 1 ? runs[0].name : `${runs.length} runs compared`;
  document.title = `${title} · Chorale`;
  const updated = Math.max(...runs.map(run => run.updated));
  const age = Date.now() / 1000 - updated;
  const quiet = updated > 0 && age > 60;
  const words = {
    file: `made ${new Date(data.made * 1000).toLocaleString()}`,
    connecting: "connecting …",
    on: updated === 0 ? "waiting for the first step" : quiet ? `nothing new for ${duration(age)}` : "live",
    off: "connection lost; trying again …",
  };
  const header = document.querySelector("header") ?? page.appendChild(make("header"));
  header.replaceChildren(make("h1", {}, title),
    make("span", {class: `state ${connection === "on" && quiet ? "" : connection}`, role: "status"}, words[connection]));
}

function overview(runs) {
  const facts = run => [
    ["steps", isNumber(run.start.steps) && run.start.steps > doneSteps(run) ? `${pretty(doneSteps(run))} of ${pretty(run.start.steps)}` : pretty(doneSteps(run))],
    ["loss, lately", pretty(lastLoss(run))],
    ["best accuracy", isNumber(bestAccuracy(run)) ? percent(bestAccuracy(run)) : undefined],
    [run.rate_unit || "throughput", numbers(run.train.rate).length > 0 ? pretty(median(run.train.rate)) : undefined],
    ["time", isNumber(seconds(run)) ? duration(seconds(run)) : undefined],
    ["ranks", run.start.ranks],
    ["parameters", isNumber(run.start.parameters) ? pretty(run.start.parameters) : undefined],
    ["waiting for peers", numbers(run.train.waiting).length > 0 ? percent(median(run.train.waiting)) : undefined],
  ];
  if (runs.length === 1) {
    return [make("div", {class: "tiles"}, facts(runs[0]).filter(([, value]) => value !== undefined)
      .map(([name, value]) => make("div", {class: "tile"}, make("b", {}, String(value)), make("span", {}, name))))];
  }
  const all = runs.map(facts);
  const used = all[0].map((_, i) => i).filter(i => all.some(one => one[i][1] !== undefined));
  const heads = used.map(i => new Set(all.map(one => one[i][0])).size === 1 ? all[0][i][0] : "throughput");
  return [make("div", {class: "scroll"}, make("table", {},
    make("thead", {}, make("tr", {}, make("th", {}, "run"), heads.map(name => make("th", {class: "number"}, name)))),
    make("tbody", {}, runs.map((run, r) => make("tr", {},
      make("td", {class: `s${colorOf(r)}`}, make("span", {class: "legend"}, make("span", {}, make("i"), run.name))),
      used.map(i => make("td", {class: "number"}, String(all[r][i][1] ?? "–"))))))))];
}

function controls() {
  const choice = (label, options, current, choose) => make("fieldset", {}, label, options.map(([value, name]) => {
    const button = make("button", {type: "button", "aria-pressed": String(value === current)}, name);
    button.addEventListener("click", () => {
      choose(value);
      render();
    });
    return button;
  }));
  return [choice("Across:", [["step", "steps"], ["time", "time"]], view.x, value => view.x = value),
    choice("Loss:", [[false, "linear"], [true, "logarithmic"]], view.log, value => view.log = value)];
}

function curves(runs, build, options) {
  const series = runs.flatMap((run, r) => build(run, colorOf(r), runs.length > 1 ? run.name : undefined));
  if (!series.some(one => numbers(one.y).length > 0)) return null;
  const across = view.x === "step" ? {xFormat: short, xTip: x => `step ${pretty(x)}`} : {xFormat: duration, xTip: duration};
  return [linePlot(series, {...across, ...options})];
}

// A curve as it is, faintly, and smoothed over it.
const noisy = one => [{...one, style: "faint", quiet: true}, {...one, y: smoothed(one.y), low: undefined, high: undefined}];

const lossCurves = runs => curves(runs, (run, color, name) => {
  const x = place(run.train);
  const evals = {name: name ? `${name}, test` : "test", color: name ? color : 1, x: place(run.evaluations), y: run.evaluations.test_loss,
    style: "dashed", dots: run.evaluations.step.length <= 40, quiet: Boolean(name)};
  return [
    ...noisy({name: name ?? "training, smoothed", color, x, y: run.train.loss, low: run.train.loss_low, high: run.train.loss_high}),
    ...(numbers(run.evaluations.test_loss).length > 0 ? [evals] : []),
  ];
}, {label: "loss", log: view.log});

// The same number while training, faintly, and on the test data.
const scoreCurves = (runs, name, options) => curves(runs, (run, color, title) => [
  {name: title ? `${title}, training` : "training", color, x: place(run.train), y: run.train[name], style: "faint", quiet: Boolean(title)},
  {name: title ?? "test", color, x: place(run.evaluations), y: run.evaluations[`test_${name}`], dots: run.evaluations.step.length <= 40},
], {label: name, ...options});

const columnCurves = (runs, column, options) => curves(runs, (run, color, name) =>
  noisy({name: name ?? "mean", color, x: place(run.train), y: run.train[column]}), options);

function timeSplit(runs) {
  if (runs.every(run => run.times.length === 0)) return [];
  const legend = [["computing", 0, "block"], ["communication, exposed", 1, "block"], ["communication, hidden", 0, "block hatched"]];
  return [
    make("div", {class: "legend"}, legend.map(([name, color, style]) => make("span", {class: `s${color}`}, make("i", {class: style}), name))),
    ...perRun(runs, run => barPlot(run.times.map(({rank, series}) => {
      const {compute, exposed, hidden} = split(series);
      return {
        label: `rank ${rank}`, value: `${pretty(compute + exposed)} ms`,
        parts: [
          {from: 0, to: compute, color: 0, title: `computing ${pretty(compute)} ms`},
          {from: Math.max(0, compute - hidden), to: compute, color: 0, hatched: true, title: `hidden communication ${pretty(hidden)} ms`},
          {from: compute, to: compute + exposed, color: 1, title: `exposed communication ${pretty(exposed)} ms`},
        ],
      };
    }), "time of a step by rank")),
    make("p", {class: "note"}, `A step: the median of ${Math.max(...runs.flatMap(run => run.times.map(one => one.series.step.length)))} sampled ones. Hidden communication goes on while the rank computes; for exposed communication it waits.`),
  ];
}

function memory(runs) {
  const peakOf = series => Math.max(...numbers(series.memory_mib), 0);
  if (!runs.some(run => run.times.some(one => peakOf(one.series) > 0))) return [];
  return [make("h2", {class: "second"}, "Peak memory"), ...perRun(runs, run => barPlot(run.times.map(({rank, series}) => {
    const peak = peakOf(series);
    return {label: `rank ${rank}`, value: `${pretty(peak)} MiB`, parts: [{from: 0, to: peak, color: 2, title: `${pretty(peak)} MiB`}]};
  }), "peak memory by rank"))];
}

// The same for each run, under its name where there are several.
function perRun(runs, build) {
  const all = runs.map(run => [run.name, build(run)]).filter(([, content]) => content);
  if (all.length === 0) return [];
  if (data.runs.length === 1) return all.map(([, content]) => content);
  return [make("div", {class: "beside"}, all.map(([name, content]) => make("div", {}, make("h3", {}, name), content)))];
}

const confusion = evaluation => drawnToFit(make("figure", {class: "matrix"}), width => [drawConfusion(evaluation, Math.min(width, 560))]);

function drawConfusion({names, confusion: counts}, width) {
  const longest = Math.max(...names.map(name => name.length));
  const left = Math.min(120, 10 + longest * 6.6), top = Math.min(110, 12 + longest * 5.4);
  const side = (width - left - top * 0.5) / names.length, size = names.length * side;
  const picture = svg("svg", {width, height: top + size, role: "img", "aria-label": "confusion matrix"});
  names.forEach((name, i) => {
    const middle = (i + 0.5) * side;
    picture.append(svg("text", {x: left - 7, y: top + middle + 4, "text-anchor": "end"}, name),
      svg("text", {transform: `translate(${left + middle + 4} ${top - 7}) rotate(-50)`}, name));
    const total = counts[i].reduce((a, b) => a + b, 0) || 1;
    counts[i].forEach((count, j) => {
      const share = count / total;
      const strength = i === j ? share ** 2 : Math.min(1, Math.sqrt(share) * 1.4);
      const box = {x: left + j * side, y: top + i * side, width: side - 2, height: side - 2, rx: 3};
      const cell = svg("g", {}, svg("title", {}, `${count} × ${name} taken for ${names[j]}`),
        svg("rect", {...box, class: "frame"}),
        svg("rect", {...box, class: i === j ? "right" : "wrong", "fill-opacity": strength.toFixed(3)}));
      if (count > 0 && side > 18) {
        cell.append(svg("text", {class: `count ${strength > 0.55 ? "on" : ""}`, x: box.x + side / 2 - 1, y: box.y + side / 2 + 3,
          style: `font-size: ${Math.min(11.5, side * 0.4).toFixed(1)}px`}, String(count)));
      }
      picture.append(cell);
    });
  });
  return picture;
}

function picture(pixels, width, height) {
  const canvas = make("canvas", {width, height});
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  const bytes = atob(pixels);
  for (let i = 0; i < bytes.length; ++i) image.data.set([bytes.charCodeAt(i), bytes.charCodeAt(i), bytes.charCodeAt(i), 255], 4 * i);
  context.putImageData(image, 0, 0);
  return canvas;
}

const evaluated = (runs, build) => perRun(runs, run => run.evaluation ? build(run.evaluation) : null);

const confusions = runs => {
  const all = evaluated(runs, confusion);
  return all.length > 0 ? [...all, make("p", {class: "note"}, "Rows: what a picture shows. Columns: what it was taken for.")] : null;
};

function mistakes(runs) {
  if (!runs.some(run => run.evaluation?.worst.length > 0)) return null;
  const shown = runs.length > 1 ? 10 : 20;
  const caption = (names, one) => make("figcaption", {}, make("b", {}, names[one.label]), make("span", {}, `${names[one.guess]}?`),
    make("span", {}, percent(Math.floor(one.probability * 1000) / 1000)));
  return [
    ...evaluated(runs, ({names, worst, width, height}) => make("div", {class: "pictures"}, worst.slice(0, shown).map(one =>
      make("figure", {title: `test picture ${one.index}`}, picture(one.pixels, width, height), caption(names, one))))),
    make("p", {class: "note"}, "What it shows, what it was taken for, and how sure the model was."),
  ];
}

const samples = runs => perRun(runs, run => {
  if (run.samples.length === 0) return null;
  const newest = last(run.samples).step;
  return make("div", {}, [...run.samples].reverse().map(({step, text}) => {
    const key = `${run.name} ${step}`;
    const details = make("details", step === newest || view.opened.has(key) ? {open: ""} : {},
      make("summary", {}, `after step ${pretty(step)}`), make("pre", {}, text));
    details.addEventListener("toggle", () => details.open ? view.opened.add(key) : view.opened.delete(key));
    return details;
  }));
});

// Ranks that died or joined while the job went on.
const rankChanges = runs => perRun(runs, run => {
  if (run.events.length === 0) return null;
  const number = value => isNumber(value) ? pretty(value) : "–";
  return make("div", {class: "scroll"}, make("table", {},
    make("thead", {}, make("tr", {}, ["step", "ranks", "cost", "what happened"].map((name, i) => make("th", i < 3 ? {class: "number"} : {}, name)))),
    make("tbody", {}, run.events.map(event => make("tr", {}, [number(event.step), number(event.ranks), `${number(event.cost_ms)} ms`,
      event.cause + (event.repeated ? "; the step was repeated" : "")].map((value, i) => make("td", i < 3 ? {class: "number"} : {}, value)))))));
});

// Calls of functions on other workers: by pair, and what each worker has at the moment.
const calls = runs => perRun(runs, run => {
  if (run.calls.length === 0 && run.workers.length === 0) return null;
  const table = (heads, lines) => make("div", {class: "scroll"}, make("table", {},
    make("thead", {}, make("tr", {}, heads.map((name, i) => make("th", i === 0 ? {} : {class: "number"}, name)))),
    make("tbody", {}, lines.map(line => make("tr", {}, line.map((value, i) => make("td", i === 0 ? {} : {class: "number"}, value)))))));
  const count = value => isNumber(value) ? pretty(value) : "–";
  const bytes = value => !isNumber(value) ? "–" : value < 1e3 ? `${value} B` : value < 1e6 ? `${pretty(value / 1e3)} kB` : `${pretty(value / 1e6)} MB`;
  const time = value => !isNumber(value) ? "–" : value < 1e3 ? `${pretty(value)} µs` : `${pretty(value / 1e3)} ms`;
  return make("div", {},
    table(["caller → called", "calls", "failed", "in flight", "sent", "received", "p50", "p99"], run.calls.map(pair =>
      [`${pair.from} → ${pair.to}`, count(pair.calls), count(pair.failed), count(pair.in_flight), bytes(pair.sent_bytes),
        bytes(pair.received_bytes), time(pair.p50_us), time(pair.p99_us)])),
    make("h3", {}, "at the moment"), table(["worker", "queued", "being served", "values it owns", "references it holds", "threads"],
      run.workers.map(worker => [worker.name, count(worker.queued), count(worker.served), count(worker.owned_references),
        count(worker.held_references), count(worker.threads)])),
    make("p", {class: "note"}, "p50 and p99: the time from a call to its answer, within an eighth."));
});

// {"optimizer": {"lr": 1}} → [["optimizer.lr", "1"]]
function flat(object, prefix = "") {
  return Object.entries(object).flatMap(([key, value]) =>
    value && typeof value === "object" && !Array.isArray(value) ? flat(value, `${prefix}${key}.`) :
      [[prefix + key, typeof value === "string" ? value : JSON.stringify(value)]]);
}

const rows = entries => make("table", {}, make("tbody", {}, entries.map(([key, value]) =>
  make("tr", {}, make("th", {scope: "row"}, key), make("td", {}, value)))));

// What was used of the options that leave something to the program, such as {"steps": 0}, stands in their place.
const optionsOf = run => ({...run.config, ...run.start.used});
const factsOf = ({start: {used, ...facts}}) => facts;

function configuration(runs) {
  if (runs.length > 1) return comparedConfiguration(runs);
  const groups = [["options", optionsOf(runs[0])], ["run and machine", factsOf(runs[0])]].map(([name, object]) => [name, flat(object)])
    .filter(([, entries]) => entries.length > 0);
  return groups.length === 0 ? null : [make("div", {class: "columns"},
    groups.map(([name, entries]) => make("div", {}, make("h3", {}, name), rows(entries))))];
}

function comparedConfiguration(runs) {
  const configs = runs.map(run => new Map(flat({...optionsOf(run), ...factsOf(run)})));
  const keys = [...new Set(configs.flatMap(config => [...config.keys()]))];
  const differs = key => new Set(configs.map(config => config.get(key))).size > 1;
  const table = chosen => make("div", {class: "scroll"}, make("table", {},
    make("thead", {}, make("tr", {}, make("th", {}, ""), runs.map(run => make("th", {}, run.name)))),
    make("tbody", {}, chosen.map(key => make("tr", {}, make("th", {scope: "row"}, key),
      configs.map(config => make("td", {}, config.get(key) ?? "–")))))));
  const same = keys.filter(key => !differs(key));
  const different = keys.filter(differs);
  return keys.length === 0 ? null : [
    different.length > 0 ? table(different) : make("p", {class: "note"}, "No option differs."),
    ...(same.length > 0 ? [make("details", {}, make("summary", {}, `${same.length} that are the same`), table(same))] : []),
  ];
}

function problems(runs) {
  const all = runs.flatMap(run => run.problems.map(problem => runs.length > 1 ? `${run.name}: ${problem}` : problem));
  for (const run of runs.filter(one => one.train.loss.includes(null))) all.push(`${run.name}: the loss was not a number at step ${pretty(run.train.step[run.train.loss.indexOf(null)])}`);
  return all.length > 0 ? [make("ul", {}, all.map(problem => make("li", {}, problem)))] : null;
}

function part(id) {
  const found = document.getElementById(id);
  if (found) return found;
  return page.appendChild(make("div", {id}));
}

function render() {
  const runs = data.runs;
  head(runs);
  const top = part("top"), bar = part("controls"), cards = part("cards"), foot = part("foot");
  bar.className = "controls";
  cards.className = "cards";
  section(top, "problems", true, "Not understood", problems(runs)).classList.add("problems");
  section(top, "overview", true, null, overview(runs));
  bar.replaceChildren(...controls());
  section(cards, "loss", false, "Loss", lossCurves(runs));
  section(cards, "accuracy", false, "Accuracy", scoreCurves(runs, "accuracy", {yFormat: value => `${Number((100 * value).toFixed(1))} %`, yTip: percent}));
  section(cards, "bits", false, "Bits per byte", scoreCurves(runs, "bits_per_byte", {}));
  const units = [...new Set(runs.map(run => run.rate_unit).filter(Boolean))].join(", ");
  section(cards, "throughput", false, `Throughput${units ? `, ${units}` : ""}`, columnCurves(runs, "rate", {low: 0, label: "throughput"}));
  section(cards, "rate", false, "Learning rate", curves(runs, (run, color, name) =>
    [{name: name ?? "learning rate", color, x: place(run.train), y: run.train.lr}], {low: 0, label: "learning rate"}));
  section(cards, "gradients", false, "Norm of the gradients", columnCurves(runs, "gradient_norm", {low: 0, label: "norm of the gradients"}));
  section(cards, "communication", false, "Share of a step spent waiting for peers", columnCurves(runs, "waiting", {low: 0, yFormat: percent, yTip: percent, label: "share of communication"}));
  for (const name of [...new Set(runs.flatMap(run => Object.keys(run.own)))].sort()) {
    section(cards, `own-${name}`, false, name, curves(runs, (run, color, title) => run.own[name]
      ? noisy({name: title ?? name, color, x: place(run.own[name]), y: run.own[name].value}) : [], {label: name}));
  }
  section(cards, "ranks", runs.length > 1, "Where the time of a step goes", [...timeSplit(runs), ...memory(runs)]);
  section(cards, "changes", true, "Ranks that died or joined", rankChanges(runs));
  section(cards, "calls", true, "Calls of functions on other workers", calls(runs));
  section(cards, "confusion", runs.length > 1, "Taken for what", confusions(runs));
  section(cards, "worst", runs.length > 1, "Worst mistakes", mistakes(runs));
  section(cards, "samples", true, "What it wrote", samples(runs));
  section(cards, "config", true, runs.length > 1 ? "What differs" : "Options, machine and versions", configuration(runs));
  foot.replaceChildren(make("footer", {}, "Made by Chorale. This file is complete: it asks nothing of any server."));
  foot.hidden = live;
}

render();
if (live) {
  const source = new EventSource("/events");
  source.addEventListener("run", event => {
    data = JSON.parse(event.data);
    connection = "on";
    render();
  });
  source.addEventListener("error", () => {
    connection = "off";
    head(data.runs);
  });
  setInterval(() => head(data.runs), 10_000);
}
