// Both pools, their workers, and the KV that flows between them.

import { bytes, el, number, objects, percent, setText, svg } from "./dom.js";

const GONE_MS = 30000;
const MANY = 24;
const MOST_LINES = 60;
const POOLS = ["prefill", "decode"];

export class Topology {
  constructor(container) {
    this.cells = new Map();
    this.gone = new Map();
    this.workers = new Map();
    this.lines = svg("svg", { class: "flows", "aria-hidden": "true" });
    this.panels = Object.fromEntries(POOLS.map((pool) => [pool, this.panel(pool)]));
    this.detail = el("p", { class: "note", id: "worker-detail", role: "status" }, "Choose a worker to see its figures.");
    this.flowText = el("p", { class: "note" });
    this.stage = el("div", { class: "stage" }, this.panels.prefill.root, el("div", { class: "between" }), this.panels.decode.root, this.lines);
    container.replaceChildren(this.stage, this.flowText, this.detail);
    new ResizeObserver(() => this.draw()).observe(this.stage);
  }

  panel(pool) {
    const title = el("h3", {}, pool);
    const grid = el("div", { class: "workers", role: "group", "aria-label": `${pool} workers, arrow keys move` });
    grid.addEventListener("keydown", (event) => move(event, grid));
    return { root: el("div", { class: `pool ${pool}` }, title, grid), title, grid };
  }

  show(snapshot) {
    const found = objects(snapshot.workers.columns, snapshot.workers.rows);
    const before = this.workers;
    this.workers = new Map(found.map((worker) => [worker.id, worker]));
    const now = performance.now();
    for (const worker of before.values()) {
      if (!this.workers.has(worker.id)) this.gone.set(worker.id, { worker: { ...worker, state: "gone" }, until: now + GONE_MS });
    }
    for (const [id, { until }] of this.gone) {
      if (until < now || this.workers.has(id)) this.gone.delete(id);
    }
    const all = [...found, ...[...this.gone.values()].map((one) => one.worker)].sort((a, b) => (a.id < b.id ? -1 : 1));
    const pools = Object.fromEntries(POOLS.map((pool) => [pool, all.filter((worker) => [pool, "both"].includes(worker.role))]));
    const shown = new Set(POOLS.flatMap((pool) => pools[pool].map((worker) => cellKey(pool, worker.id))));
    for (const [key, cell] of this.cells) {
      if (!shown.has(key)) {
        cell.remove();
        this.cells.delete(key);
      }
    }
    for (const pool of POOLS) this.fill(pool, pools[pool]);
    const left = snapshot.workers.count - snapshot.workers.rows.length;
    this.flows = snapshot.flows;
    this.tellFlows(left);
    this.tell();
    this.draw();
  }

  fill(pool, workers) {
    const { title, grid } = this.panels[pool];
    const ready = workers.filter((worker) => worker.state === "ready").length;
    setText(title, `${pool}: ${number(ready)} of ${number(workers.length)} ready`);
    grid.classList.toggle("compact", workers.length > MANY);
    workers.forEach((worker, index) => {
      const cell = this.cells.get(cellKey(pool, worker.id)) ?? this.cell(worker.id);
      this.cells.set(cellKey(pool, worker.id), cell);
      if (grid.children[index] !== cell) grid.insertBefore(cell, grid.children[index] ?? null);
      paint(cell, worker);
    });
    if (!grid.querySelector('[tabindex="0"]') && grid.firstChild) grid.firstChild.setAttribute("tabindex", "0");
  }

  cell(id) {
    const choose = () => {
      this.chosen = id;
      this.tell();
    };
    const parts = ["name", "load", "fill"].map((name) => el("span", { class: name }));
    parts[2].append(el("span"));
    return el("button", { type: "button", tabindex: -1, onclick: choose, onfocus: choose }, ...parts);
  }

  tell() {
    if (!this.chosen) return;
    const worker = this.workers.get(this.chosen) ?? this.gone.get(this.chosen)?.worker;
    if (!worker) return;
    const step = worker.step_ms ? `, ${number(worker.step_ms, 1)} ms a step` : "";
    const rate = worker.prefill_tokens_per_s ? `, ${number(worker.prefill_tokens_per_s)} prompt tokens/s` : "";
    const circuit = worker.circuit === "closed" ? "" : `, circuit ${worker.circuit}`;
    const text =
      `${worker.id} (${worker.model}): ${worker.state} for ${number(worker.state_s)} s${circuit}, ${worker.running} running, ` +
      `${worker.waiting} waiting, ${number(worker.waiting_tokens)} tokens to compute, KV ${percent(used(worker))} of ` +
      `${number(worker.total_blocks)} blocks, ${worker.transfers} handoffs in flight${rate}${step}`;
    setText(this.detail, worker.state === "gone" ? `${worker.id} is gone` : text);
  }

  tellFlows(left) {
    const rate = this.flows.reduce((sum, flow) => sum + flow[3], 0);
    const handoffs = this.flows.reduce((sum, flow) => sum + flow[2], 0);
    const more = left > 0 ? ` ${number(left)} more workers are not shown.` : "";
    const largest = this.flows[0] ? `, most from ${this.flows[0][0]} to ${this.flows[0][1]}` : "";
    setText(this.flowText, `KV: ${bytes(rate)}/s in ${number(handoffs, 1)} handoffs/s over ${this.flows.length} pairs${largest}.${more}`);
  }

  // Lines run between the panels only, at the height (stacked: at the place) of their workers.
  draw() {
    if (!this.flows) return;
    const frame = this.stage.getBoundingClientRect();
    const [from, to] = POOLS.map((pool) => this.panels[pool].root.getBoundingClientRect());
    const stacked = to.top >= from.bottom;
    const most = Math.max(1, ...this.flows.map((flow) => flow[3]));
    const made = this.flows.slice(0, MOST_LINES).flatMap(([prefill, decode, , rate]) => {
      const ends = [this.cells.get(cellKey("prefill", prefill)), this.cells.get(cellKey("decode", decode))];
      if (!ends[0] || !ends[1]) return [];
      const [a, b] = ends.map((cell) => cell.getBoundingClientRect());
      const d = stacked
        ? curve(a.left + a.width / 2 - frame.left, from.bottom - frame.top, b.left + b.width / 2 - frame.left, to.top - frame.top, true)
        : curve(from.right - frame.left, a.top + a.height / 2 - frame.top, to.left - frame.left, b.top + b.height / 2 - frame.top, false);
      return [svg("path", { d, class: "flow", "stroke-width": (1 + (4 * rate) / most).toFixed(1) })];
    });
    this.lines.setAttribute("viewBox", `0 0 ${frame.width} ${frame.height}`);
    const wanted = made.map((path) => path.outerHTML).join();
    if (wanted === this.drawn) return;
    this.drawn = wanted;
    this.lines.replaceChildren(...made);
  }
}

// A worker with both roles has a cell in each pool.
function cellKey(pool, id) {
  return `${pool}/${id}`;
}

function used(worker) {
  return worker.total_blocks ? 1 - worker.free_blocks / worker.total_blocks : 0;
}

function paint(cell, worker) {
  const [name, load, fill] = cell.children;
  setText(name, worker.id);
  setText(load, worker.state === "ready" ? `${worker.running} run, ${worker.waiting} wait` : worker.state);
  fill.firstChild.style.width = percent(used(worker));
  const label = `${worker.id}: ${worker.state}, ${worker.running} running, ${worker.waiting} waiting, KV ${percent(used(worker))}`;
  if (cell.getAttribute("aria-label") !== label) cell.setAttribute("aria-label", label);
  const classes = `worker ${worker.state}${worker.circuit === "closed" ? "" : " tripped"}`;
  if (cell.className !== classes) cell.className = classes;
}

function curve(x1, y1, x2, y2, stacked) {
  const n = (value) => value.toFixed(1);
  const [mx, my] = [(x1 + x2) / 2, (y1 + y2) / 2];
  if (stacked) return `M${n(x1)} ${n(y1)}C${n(x1)} ${n(my)} ${n(x2)} ${n(my)} ${n(x2)} ${n(y2)}`;
  return `M${n(x1)} ${n(y1)}C${n(mx)} ${n(y1)} ${n(mx)} ${n(y2)} ${n(x2)} ${n(y2)}`;
}

function move(event, grid) {
  const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
  const cells = [...grid.children];
  const at = cells.indexOf(document.activeElement);
  if (!step || at < 0) return;
  event.preventDefault();
  const next = cells[Math.min(cells.length - 1, Math.max(0, at + step))];
  cells[at].setAttribute("tabindex", "-1");
  next.setAttribute("tabindex", "0");
  next.focus();
}
