"use strict";
// Draws the charts of a report from the data beside it; no library, no network.
const report = JSON.parse(document.getElementById("data").textContent);
const COLOURS = ["#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9", "#7b3fa0", "#b2182b"];
const DASHES = ["", "6 3", "2 3"];
const names = [];
for (const setting of report.settings)
  for (const a of setting.architectures) if (!names.includes(a.name)) names.push(a.name);
const hidden = new Set();
const colour = (name) => COLOURS[names.indexOf(name) % COLOURS.length];
const dash = (name) => DASHES[Math.floor(names.indexOf(name) / COLOURS.length) % DASHES.length];
const signed = (v) => (v < 0 ? "−" : "+") + Math.abs(v).toFixed(3);

function element(tag, attributes, parent, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.appendChild(node);
  return node;
}

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) found.push(i * step);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return found.map((v) => [v, (v < -1e-12 ? "−" : "") + Math.abs(v).toFixed(digits)]);
}

function range(values, pad) {
  let low = Math.min(...values), high = Math.max(...values);
  if (low === high) { low -= 0.5; high += 0.5; }
  const extra = (high - low) * pad;
  return [low - extra, high + extra];
}

function frame(holder, height, margin) {
  const svg = element("svg", { height, role: "img" });
  holder.querySelector(".plot").replaceChildren(svg);
  const width = holder.querySelector(".plot").clientWidth;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const inner = { left: margin.left, right: width - margin.right, top: margin.top, bottom: height - margin.bottom };
  return { svg, width, height, inner };
}

function scale(domain, from, to) {
  return (v) => from + ((v - domain[0]) / (domain[1] - domain[0])) * (to - from);
}

function axes(f, xs, ys, x, y, xTitle, yTitle) {
  const { svg, inner } = f;
  for (const [v, label] of ticks(...[...xs].sort((a, b) => a - b), inner.right - inner.left < 340 ? 4 : 6)) {
    element("line", { class: "grid", x1: x(v), x2: x(v), y1: inner.top, y2: inner.bottom }, svg);
    element("text", { x: x(v), y: inner.bottom + 16, "text-anchor": "middle" }, svg, label);
  }
  if (ys) for (const [v, label] of ticks(...ys, 6)) {
    element("line", { class: "grid", x1: inner.left, x2: inner.right, y1: y(v), y2: y(v) }, svg);
    element("text", { x: inner.left - 6, y: y(v) + 4, "text-anchor": "end" }, svg, label);
  }
  element("text", { x: inner.right, y: inner.bottom + 34, "text-anchor": "end" }, svg, xTitle);
  if (yTitle) element("text", { x: 0, y: 11 }, svg, yTitle);
}

function tip(holder, node, text) {
  const box = holder.querySelector(".tip");
  const show = (event) => {
    box.textContent = text;
    box.style.display = "block";
    const at = holder.getBoundingClientRect();
    const left = event.clientX - at.left + 12, width = box.offsetWidth;
    box.style.left = Math.max(0, left + width > at.width ? left - width - 24 : left) + "px";
    box.style.top = event.clientY - at.top + 14 + "px";
  };
  node.addEventListener("pointermove", show);
  node.addEventListener("pointerdown", show);
  node.addEventListener("pointerleave", () => (box.style.display = "none"));
}

const path = (points) => points.map(([a, b], i) => `${i ? "L" : "M"}${a.toFixed(1)},${b.toFixed(1)}`).join("");
const shown = (setting) => setting.architectures.filter((a) => !hidden.has(a.name));

function curves(holder, setting, target) {
  const f = frame(holder, 340, { left: 46, right: 12, top: 24, bottom: 42 });
  const runs = shown(setting).flatMap((a) => a.runs.map((r) => ({ a, r, y: r.losses[target] })));
  if (!runs.length) return;
  const xs = range(runs.flatMap(({ r }) => r.pretraining_loss), 0.03);
  const ys = range(runs.flatMap((u) => u.y), 0.05);
  const x = scale([xs[1], xs[0]], f.inner.left, f.inner.right), y = scale(ys, f.inner.bottom, f.inner.top);
  axes(f, xs, ys, x, y, "pre-training loss (training goes to the right) →", `loss on ${label(target)}`);
  for (const { a, r, y: losses } of runs) {
    const points = r.pretraining_loss.map((v, i) => [x(v), y(losses[i])]);
    element("path", { d: path(points), fill: "none", stroke: colour(a.name), "stroke-width": a.gap ? 1.6 : 2.4,
      "stroke-dasharray": dash(a.name) }, f.svg);
    points.forEach(([px, py], i) => {
      element("circle", { cx: px, cy: py, r: 2, fill: colour(a.name) }, f.svg);
      const hit = element("circle", { class: "hit", cx: px, cy: py, r: 9 }, f.svg);
      tip(holder, hit, `${a.name}, seed ${r.seed}\n${r.tokens[i].toLocaleString("en")} tokens\npre-training loss ` +
        `${r.pretraining_loss[i].toFixed(4)}\n${label(target)} ${losses[i].toFixed(4)}`);
    });
  }
}

function label(target) {
  return target === "mean" ? "the mean of these domains" : target;
}

function forest(holder, setting, target) {
  const rows = setting.architectures.filter((a) => a.gap && a.gap.targets[target]);
  const longest = Math.max(0, ...rows.map((a) => a.name.length));
  const narrow = holder.querySelector(".plot").clientWidth < 460;
  const high = narrow ? 40 : 26;
  const f = frame(holder, rows.length * high + 70, { left: narrow ? 22 : Math.min(240, 7.6 * longest + 22), right: 16,
    top: 20, bottom: 42 });
  if (!rows.length) return;
  const found = rows.map((a) => a.gap.targets[target]);
  const xs = range([...found.flatMap((e) => [e.low, e.high]), 0, -report.margin, report.margin], 0.05);
  const x = scale(xs, f.inner.left, f.inner.right);
  element("rect", { class: "band", x: x(-report.margin), width: x(report.margin) - x(-report.margin), y: f.inner.top,
    height: f.inner.bottom - f.inner.top }, f.svg);
  axes(f, xs, null, x, null, narrow ? "gap; right: worse →" : `gap to ${report.reference}; right: worse →`, "");
  element("line", { class: "zero", x1: x(0), x2: x(0), y1: f.inner.top, y2: f.inner.bottom }, f.svg);
  rows.forEach((a, i) => {
    const e = found[i], top = f.inner.top + i * high, mid = top + (narrow ? 29 : high / 2);
    const g = element("g", { class: hidden.has(a.name) ? "faint" : "" }, f.svg);
    element("text", narrow ? { class: "name", x: 0, y: top + 16 } : { class: "name", x: f.inner.left - 8, y: mid + 4,
      "text-anchor": "end" }, g, a.name);
    element("line", { x1: x(e.low), x2: x(e.high), y1: mid, y2: mid, stroke: colour(a.name), "stroke-width": 2.5 }, g);
    element("circle", { cx: x(e.value), cy: mid, r: 4.5, fill: colour(a.name) }, g);
    const hit = element("rect", { class: "hit", x: 0, width: f.width, y: top, height: high }, g);
    tip(holder, hit, `${a.name}, ${label(target)}\ngap ${signed(e.value)} [${signed(e.low)}, ${signed(e.high)}]\nat a ` +
      `pre-training loss of ${a.gap.at_pretraining_loss.toFixed(3)}` + (target === "mean" ? `\n${a.gap.verdict}` : ""));
  });
}

function gapCurves(holder, setting) {
  const f = frame(holder, 340, { left: 52, right: 12, top: 24, bottom: 42 });
  const rows = shown(setting).filter((a) => a.gap && a.gap.curve.length);
  if (!rows.length) return;
  const xs = range(rows.flatMap((a) => a.gap.curve.map((p) => p[0])), 0.02);
  const few = rows.length <= 3;
  const ys = range([...rows.flatMap((a) => a.gap.curve.flatMap((p) => (few ? [p[2], p[3]] : [p[1]]))), 0], 0.08);
  const x = scale([xs[1], xs[0]], f.inner.left, f.inner.right), y = scale(ys, f.inner.bottom, f.inner.top);
  axes(f, xs, ys, x, y, "pre-training loss →", `gap to ${report.reference}` + (few ? ", with intervals" : ""));
  element("line", { class: "zero", x1: f.inner.left, x2: f.inner.right, y1: y(0), y2: y(0) }, f.svg);
  for (const a of rows) {
    const c = a.gap.curve;
    if (few) element("path", { d: path([...c.map((p) => [x(p[0]), y(p[3])]), ...[...c].reverse().map((p) =>
      [x(p[0]), y(p[2])])]) + "Z", fill: colour(a.name), opacity: 0.15 }, f.svg);
    element("path", { d: path(c.map((p) => [x(p[0]), y(p[1])])), fill: "none", stroke: colour(a.name),
      "stroke-width": 1.8, "stroke-dasharray": dash(a.name) }, f.svg);
    for (const p of c) {
      const hit = element("circle", { class: "hit", cx: x(p[0]), cy: y(p[1]), r: 9 }, f.svg);
      tip(holder, hit, `${a.name}\npre-training loss ${p[0].toFixed(3)}\ngap ${signed(p[1])} [${signed(p[2])}, ` +
        `${signed(p[3])}]`);
    }
  }
}

const kinds = { curves, forest, gap: gapCurves };
function draw() {
  for (const holder of document.querySelectorAll("[data-chart]")) {
    const setting = report.settings[holder.dataset.setting];
    const chosen = document.getElementById(`target-${holder.dataset.setting}`);
    kinds[holder.dataset.chart](holder, setting, chosen ? chosen.value : "mean");
  }
}

for (const list of document.querySelectorAll(".legend")) {
  const setting = report.settings[list.dataset.setting];
  for (const a of setting.architectures) {
    const item = document.createElement("li"), button = document.createElement("button");
    const key = element("svg", { viewBox: "0 0 26 10" }, button);
    element("line", { x1: 0, x2: 26, y1: 5, y2: 5, stroke: colour(a.name), "stroke-width": 3,
      "stroke-dasharray": dash(a.name) }, key);
    button.append(a.name);
    button.dataset.name = a.name;
    button.addEventListener("click", () => {
      hidden.has(a.name) ? hidden.delete(a.name) : hidden.add(a.name);
      for (const b of document.querySelectorAll(".legend button"))
        b.setAttribute("aria-pressed", String(!hidden.has(b.dataset.name)));
      draw();
    });
    button.setAttribute("aria-pressed", "true");
    item.append(button);
    list.append(item);
  }
}
for (const select of document.querySelectorAll("select")) select.addEventListener("change", draw);
let timer;
addEventListener("resize", () => { clearTimeout(timer); timer = setTimeout(draw, 100); });
draw();
