// The figures over time of one model: key figures and charts.

import { Chart } from "./charts.js";
import { el, milliseconds, number, objects, percent, setText } from "./dom.js";

const PHASES = [
  ["admit", "admission"],
  ["reserve", "reserve"],
  ["prefill_queue", "prefill queue"],
  ["prefill_compute", "prefill"],
  ["local_prefill", "local prefill"],
];

export class Figures {
  constructor(byId) {
    const ms = { format: (value) => milliseconds(value) };
    this.tiles = byId("tiles");
    this.ttft = new Chart(byId("ttft-chart"), { ...ms, stacked: true, label: "Mean time to first token by phase" });
    this.tpot = new Chart(byId("tpot-chart"), { ...ms, label: "Time per output token" });
    this.rate = new Chart(byId("rate-chart"), {
      format: (value) => number(value, value && value < 10 ? 1 : 0),
      label: "Requests a second and queued requests",
    });
    this.kv = new Chart(byId("kv-chart"), { format: percent, label: "Share of KV blocks in use" });
    this.blocks = byId("kv-blocks");
    this.models = {};
  }

  // All points: what /page/history answers.
  replace(history) {
    this.columns = history.columns;
    this.limit = 300;
    this.step = history.step_s;
    this.models = history.models;
  }

  // Adds the points of a snapshot. False: some were missed, and the history must be read anew.
  add(latest) {
    for (const [model, row] of Object.entries(latest)) {
      const rows = (this.models[model] ??= []);
      const before = rows.at(-1);
      if (before && before[0] >= row[0]) continue;
      if (before && row[0] - before[0] > 1.5 * this.step) return false;
      rows.push(row);
      if (rows.length > this.limit) rows.shift();
    }
    return true;
  }

  show(model, snapshot) {
    const points = objects(this.columns, this.models[model] ?? []);
    const times = points.map((point) => point.at);
    this.showTtft(points, times);
    const line = (name, color, of) => ({ name, color, values: points.map(of) });
    this.tpot.show(times, [
      line("median", 4, (point) => point.tpot_p50_ms),
      line("99th percentile", 6, (point) => point.tpot_p99_ms),
    ]);
    this.rate.show(times, [
      line("requests/s", 1, (point) => point.requests / this.step),
      line("refused or failed/s", 6, (point) => point.failed / this.step),
      line("queued", 3, (point) => point.queued),
    ]);
    this.kv.show(times, [
      line("prefill pool", 1, (point) => point.prefill_kv),
      line("decode pool", 4, (point) => point.decode_kv),
    ]);
    this.showTiles(points, model, snapshot);
    this.showBlocks(model, snapshot);
  }

  // Means of each interval: the parts add up to the mean time to the first token.
  showTtft(points, times) {
    const mean = (point, ms) => (point.ttft_count ? ms / point.ttft_count : 0);
    const parts = PHASES.map(([phase, name], index) => ({
      name,
      color: index + 1,
      values: points.map((point) => mean(point, point[`${phase}_ms`])),
    })).filter((one) => one.name !== "local prefill" || one.values.some((value) => value > 0));
    const rest = points.map((point) => {
      const known = PHASES.reduce((sum, [phase]) => sum + point[`${phase}_ms`], 0);
      return mean(point, Math.max(0, point.ttft_ms - known));
    });
    this.ttft.show(times, [...parts, { name: "deliver", color: 7, values: rest }]);
  }

  showTiles(points, model, snapshot) {
    const recent = points.slice(-5);
    const seconds = Math.max(1, recent.length) * this.step;
    const sum = (name) => recent.reduce((total, point) => total + (point[name] ?? 0), 0);
    const worst = (name) => {
      const found = recent.map((point) => point[name]).filter((value) => value !== null);
      return found.length ? milliseconds(Math.max(...found)) : "none";
    };
    const mean = (ms, count) => (sum(count) ? milliseconds(sum(ms) / sum(count)) : "none");
    const now = snapshot.models.find((one) => one.model === model);
    const queued = now ? Object.values(now.queued).reduce((total, one) => total + one, 0) : 0;
    const tiles = [
      ["requests/s", number(sum("requests") / seconds, 1)],
      ["in progress", number(snapshot.running_requests)],
      ["queued", number(queued)],
      ["mean TTFT", mean("ttft_ms", "ttft_count")],
      ["worst p99 TTFT", worst("ttft_p99_ms")],
      ["mean TPOT", mean("tpot_ms", "tpot_count")],
      ["worst p99 TPOT", worst("tpot_p99_ms")],
      ["refused or failed/s", number(sum("failed") / seconds, 1)],
    ];
    tiles.forEach(([name, value], index) => {
      if (!this.tiles.children[index]) this.tiles.append(el("div", {}, el("dt", {}, name), el("dd")));
      setText(this.tiles.children[index].lastChild, value);
    });
  }

  // What the KV blocks of each pool are used for now, and what the caches spared.
  showBlocks(model, snapshot) {
    const workers = objects(snapshot.workers.columns, snapshot.workers.rows);
    const now = snapshot.models.find((one) => one.model === model);
    const found = ["prefill", "decode"].map((pool) => {
      const mine = workers.filter((worker) => [pool, "both"].includes(worker.role) && worker.model === model);
      const sum = (name) => mine.reduce((total, worker) => total + worker[name], 0);
      const total = sum("total_blocks") || 1;
      const parts = [
        ["referenced", 1, sum("referenced_blocks")],
        ["reserved", 3, sum("reserved_blocks")],
        ["quarantined", 6, sum("quarantined_blocks")],
        ["free or cached", 8, sum("free_blocks")],
      ];
      const bar = el("div", { class: "blocks", "aria-hidden": "true" });
      for (const [, color, blocks] of parts) {
        const part = el("span", { class: `c${color}` });
        part.style.width = `${(100 * blocks) / total}%`;
        bar.append(part);
      }
      const hits = now ? `, prefix cache hits ${percent(now.hits[pool])}` : "";
      const text = parts.map(([name, , blocks]) => `${number(blocks)} ${name}`).join(", ");
      return el("div", {}, el("p", { class: "note" }, `${pool}: ${text} of ${number(sum("total_blocks"))} blocks${hits}`), bar);
    });
    this.blocks.replaceChildren(...found);
  }
}
