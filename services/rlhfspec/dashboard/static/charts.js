"use strict";
// Small pictures: a curve over steps with a cursor, and a sparkline. All text goes in as text, never as markup.

const SVG = new Set(["svg", "g", "path", "line", "text", "circle", "polyline"]);

function h(tag, props = {}, ...children) {
  const element = SVG.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

function number(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e9) return value.toExponential(1);
  if (size >= 999.5) return Math.round(value).toLocaleString("en");
  if (size < 1e-4) return value.toExponential(1);
  return String(Number(value.toPrecision(digits)));
}

// Round numbers between low and high, about `count` of them.
function ticks(low, high, count) {
  const rough = (high - low) / Math.max(count, 1) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) found.push(Math.abs(at) < step / 1e6 ? 0 : at);
  return found;
}

// series: {key, label, band?}: columns of the rows; band: a column that is drawn around it.
class Chart {
  static all = new Set();

  constructor(title, series, unit) {
    Object.assign(this, { title, series, unit, rows: [], cursor: null });
    this.readout = h("output", { class: "readout" });
    this.area = h("div", { class: "area", tabindex: "0", role: "group", "aria-label": `${title} in ${unit}, by step; arrow keys move the cursor` });
    this.element = h("figure", { class: "chart card" }, h("figcaption", {}, h("span", { class: "what" }, title), this.readout), this.area);
    this.area.addEventListener("pointermove", (event) => this.point(event));
    this.area.addEventListener("pointerleave", () => Chart.show(null));
    this.area.addEventListener("blur", () => Chart.show(null));
    this.area.addEventListener("keydown", (event) => this.key(event));
    this.sizes = new ResizeObserver(() => this.draw());
    this.sizes.observe(this.area);
    Chart.all.add(this);
  }

  close() { this.sizes.disconnect(); Chart.all.delete(this); }

  static show(step) { for (const chart of Chart.all) { chart.cursor = step; chart.drawCursor(); } }

  update(columns, rows) {
    this.at = Object.fromEntries(columns.map((name, place) => [name, place]));
    this.drawn = this.series.filter((each) => rows.some((row) => row[this.at[each.key]] !== null));
    this.rows = rows.filter((row) => this.series.some((each) => row[this.at[each.key]] !== null));
    this.draw();
  }

  value(row, key) { return row[this.at[key]]; }

  draw() {
    const width = this.area.clientWidth, height = 150;
    if (!width) return;
    this.area.replaceChildren();
    if (!this.rows.length) { this.area.append(h("p", { class: "quiet empty" }, "no numbers yet")); this.readout.textContent = ""; return; }
    const left = 48, right = 10, top = 20, bottom = 20;
    const steps = this.rows.map((row) => row[0]), values = this.extent();
    let [low, high] = values;
    if (low === high) { const pad = Math.abs(low) * 0.1 || 1; low -= pad; high += pad; }
    const first = steps[0], last = Math.max(steps[steps.length - 1], first + 1);
    this.x = (step) => left + ((step - first) / (last - first)) * (width - left - right);
    this.y = (value) => top + (1 - (value - low) / (high - low)) * (height - top - bottom);
    const svg = h("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": this.summary() });
    for (const tick of ticks(low, high, 4)) {
      svg.append(h("line", { class: "grid", x1: left, x2: width - right, y1: this.y(tick), y2: this.y(tick) }));
      svg.append(h("text", { class: "tick", x: left - 6, y: this.y(tick) + 4, "text-anchor": "end" }, number(tick)));
    }
    for (const tick of ticks(first, last, Math.min(6, width / 70)).filter(Number.isInteger))
      svg.append(h("text", { class: "tick", x: this.x(tick), y: height - 4, "text-anchor": "middle" }, number(tick)));
    svg.append(h("text", { class: "tick unit", x: 2, y: 10 }, this.unit));
    svg.append(h("text", { class: "tick unit", x: 2, y: height - 4 }, "step"));
    this.drawn.forEach((each, place) => this.line(svg, each, place));
    this.mark = h("g", { class: "cursor" });
    svg.append(this.mark);
    this.area.append(svg);
    this.drawCursor();
  }

  extent() {
    let low = Infinity, high = -Infinity;
    for (const row of this.rows) for (const each of this.drawn) {
      const value = this.value(row, each.key);
      if (value === null) continue;
      low = Math.min(low, value); high = Math.max(high, value);
    }
    return [low, high];
  }

  line(svg, each, place) {
    const points = this.rows.filter((row) => this.value(row, each.key) !== null)
      .map((row) => [this.x(row[0]).toFixed(1), this.y(this.value(row, each.key)).toFixed(1)]);
    if (points.length === 1) svg.append(h("circle", { class: `dot s${place}`, cx: points[0][0], cy: points[0][1], r: 3 }));
    else if (points.length) svg.append(h("path", { class: `line s${place}`, d: "M" + points.map((point) => point.join(" ")).join("L") }));
  }

  summary() {
    const last = this.rows[this.rows.length - 1];
    return `${this.title}, ${this.rows.length} points up to step ${last[0]}: ` +
      this.drawn.map((each) => `${each.label} ${number(this.value(last, each.key))}`).join(", ");
  }

  drawCursor() {
    if (!this.mark || !this.rows.length) return;
    const row = this.cursor === null ? this.rows[this.rows.length - 1] : this.nearest(this.cursor);
    this.readout.replaceChildren(...this.drawn.flatMap((each, place) => [
      h("span", { class: `key s${place}` }, this.drawn.length > 1 ? `${each.label} ` : "", h("b", {}, number(this.value(row, each.key)))), " "]));
    this.mark.replaceChildren();
    if (this.cursor === null) return;
    this.readout.append(h("span", { class: "quiet" }, ` step ${row[0]}`));
    this.mark.append(h("line", { x1: this.x(row[0]), x2: this.x(row[0]), y1: 20, y2: 130 }));
    this.drawn.forEach((each, place) => {
      const value = this.value(row, each.key);
      if (value !== null) this.mark.append(h("circle", { class: `dot s${place}`, cx: this.x(row[0]), cy: this.y(value), r: 3.5 }));
    });
  }

  nearest(step) { return this.rows.reduce((best, row) => Math.abs(row[0] - step) < Math.abs(best[0] - step) ? row : best); }

  point(event) {
    if (!this.rows.length || !this.x) return;
    const at = event.clientX - this.area.getBoundingClientRect().left;
    Chart.show(this.rows.reduce((best, row) => Math.abs(this.x(row[0]) - at) < Math.abs(this.x(best[0]) - at) ? row : best)[0]);
  }

  key(event) {
    const places = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (!(event.key in places) || !this.rows.length) return;
    event.preventDefault();
    const now = this.cursor === null ? this.rows.length - 1 : this.rows.indexOf(this.nearest(this.cursor));
    Chart.show(this.rows[Math.min(Math.max(now + places[event.key], 0), this.rows.length - 1)][0]);
  }
}

function sparkline(values, width = 72, height = 18) {
  const high = Math.max(...values, 1e-9);
  const points = values.map((value, place) => `${((place / Math.max(values.length - 1, 1)) * (width - 2) + 1).toFixed(1)},${(height - 2 - (value / high) * (height - 4)).toFixed(1)}`);
  return h("svg", { class: "spark", width, height, "aria-hidden": "true" }, h("polyline", { points: points.join(" ") }));
}
