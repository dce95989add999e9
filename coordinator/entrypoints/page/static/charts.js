// Small charts over time: lines, or areas on top of each other. Arrow keys and the pointer read values.

import { clock, el, setText, svg } from "./dom.js";

const HEIGHT = 150;
const LEFT = 64;
const BOTTOM = 18;
const TOP = 6;

// `series`: [{ name, color (1..7), values }], as many values as `times`; null: no value.
export class Chart {
  constructor(container, { stacked = false, format, label }) {
    this.stacked = stacked;
    this.format = format;
    this.label = label;
    this.at = null;
    this.plot = svg("svg", { role: "img", class: "plot", height: HEIGHT });
    this.frame = el("div", { class: "chart", tabindex: 0, role: "group", "aria-label": `${label}: arrow keys read values` }, this.plot);
    this.legend = el("ul", { class: "legend" });
    this.frame.addEventListener("pointermove", (event) => this.point(event));
    this.frame.addEventListener("pointerleave", () => this.select(null));
    this.frame.addEventListener("blur", () => this.select(null));
    this.frame.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.frame);
    container.replaceChildren(this.frame, this.legend);
  }

  show(times, series) {
    this.times = times;
    this.series = series;
    this.draw();
  }

  draw() {
    const width = this.frame.clientWidth;
    if (!this.times || width < 100) return;
    const count = this.times.length;
    const tops = this.tops();
    const most = Math.max(...tops.flat().filter((value) => value !== null), 0);
    const limit = nice(most);
    this.x = (index) => LEFT + ((width - LEFT - 4) * index) / Math.max(1, count - 1);
    const y = (value) => HEIGHT - BOTTOM - ((HEIGHT - BOTTOM - TOP) * value) / limit;
    const parts = this.axes(width, limit, y);
    this.series.forEach((one, index) => {
      const under = this.stacked && index ? tops[index - 1] : null;
      parts.push(...(this.stacked ? [this.area(one, tops[index], under, y)] : this.lines(one, y)));
    });
    if (this.at !== null && this.at < count) {
      const x = this.x(this.at);
      parts.push(svg("line", { x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM, class: "cursor" }));
    }
    this.plot.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.plot.setAttribute("aria-label", this.summary());
    this.plot.replaceChildren(...parts);
    this.tell();
  }

  tops() {
    if (!this.stacked) return this.series.map((one) => one.values);
    let sums = this.times.map(() => 0);
    return this.series.map((one) => (sums = sums.map((sum, index) => sum + (one.values[index] ?? 0))));
  }

  axes(width, limit, y) {
    const parts = [0, limit / 2, limit].flatMap((value) => [
      svg("line", { x1: LEFT, x2: width - 4, y1: y(value), y2: y(value), class: "grid" }),
      svg("text", { x: LEFT - 6, y: y(value) + 4, class: "tick", "text-anchor": "end" }, this.format(value)),
    ]);
    if (this.times.length) {
      const line = HEIGHT - 4;
      parts.push(svg("text", { x: LEFT, y: line, class: "tick" }, clock(this.times[0])));
      const end = { x: width - 4, y: line, class: "tick", "text-anchor": "end" };
      parts.push(svg("text", end, clock(this.times.at(-1))));
    }
    return parts;
  }

  area(one, top, under, y) {
    const there = top.map((value, index) => `${this.x(index).toFixed(1)},${y(value).toFixed(1)}`);
    const back = top.map((_, index) => `${this.x(index).toFixed(1)},${y(under ? under[index] : 0).toFixed(1)}`);
    return svg("polygon", { points: [...there, ...back.reverse()].join(" "), class: `area c${one.color}` });
  }

  lines(one, y) {
    const found = [];
    let points = [];
    one.values.forEach((value, index) => {
      if (value !== null) points.push([this.x(index), y(value)]);
      if ((value === null || index === one.values.length - 1) && points.length) {
        const first = points[0];
        if (points.length === 1) points.push([first[0] + 2, first[1]]);
        const text = points.map(([px, py]) => `${px.toFixed(1)},${py.toFixed(1)}`).join(" ");
        found.push(svg("polyline", { points: text, class: `line c${one.color}` }));
        points = [];
      }
    });
    return found;
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !this.times?.length) return;
    event.preventDefault();
    const last = this.times.length - 1;
    this.select(Math.min(last, Math.max(0, (this.at ?? last) + (this.at === null ? 0 : step))));
  }

  point(event) {
    if (!this.times?.length) return;
    const place = event.clientX - this.frame.getBoundingClientRect().left;
    const share = (place - LEFT) / Math.max(1, this.frame.clientWidth - LEFT - 4);
    const last = this.times.length - 1;
    this.select(Math.min(last, Math.max(0, Math.round(share * last))));
  }

  select(index) {
    this.at = index;
    this.draw();
  }

  tell() {
    const index = this.at ?? this.times.length - 1;
    const when = this.at === null || this.times[index] === undefined ? "" : ` at ${clock(this.times[index])}`;
    while (this.legend.children.length > this.series.length) this.legend.lastChild.remove();
    this.series.forEach((one, place) => {
      if (!this.legend.children[place]) {
        this.legend.append(el("li", {}, el("span", { class: `key c${one.color}` }), el("span")));
      }
      setText(this.legend.children[place].lastChild, `${this.value(one, index)}${place === 0 ? when : ""}`);
    });
  }

  summary() {
    return `${this.label}, latest: ${this.series.map((one) => this.value(one, -1)).join(", ")}`;
  }

  value(one, index) {
    const value = one.values.at(index) ?? null;
    return `${one.name} ${value === null ? "none" : this.format(value)}`;
  }
}

// The next of 1, 2, 5 times a power of ten.
function nice(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}
