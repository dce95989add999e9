// What the autoscaler wants of each pool, what it does next, and what it decided before, with reasons.

import { clock, el, table } from "./dom.js";

export class Scaling {
  constructor(container) {
    this.container = container;
  }

  show(scaling) {
    const shown = JSON.stringify([scaling.latest, scaling.entries, scaling.in_force]);
    if (shown === this.shown) return;
    this.shown = shown;
    if (!scaling.latest.length) {
      const plan = scaling.in_force ? "A plan is in force that gives no reasons." : "No autoscaler has sent a plan.";
      this.container.replaceChildren(el("p", { class: "note" }, plan));
      return;
    }
    const over = scaling.in_force ? [] : [el("p", { class: "bad" }, "The last plan has expired: no autoscaler acts.")];
    this.container.replaceChildren(...over, el("div", { class: "pair" }, ...scaling.latest.map(now)), timeline(scaling.entries));
  }
}

function now(one) {
  const standby = one.standby ? ` and ${one.standby} on standby` : "";
  const next = one.actions.length ? one.actions.join(", ") : upcoming(one);
  return el(
    "div",
    {},
    el("h3", {}, `${named(one)}: ${one.desired} wanted${standby}, ${one.ready} ready, ${one.starting} starting`),
    el("p", {}, `next: ${next}`),
    el("p", { class: "note" }, `${one.cause}: ${one.reason}`),
  );
}

function named(one) {
  return one.model ? `${one.model} ${one.pool}` : one.pool;
}

function upcoming(one) {
  if (one.ready < one.desired && one.starting) return "waits for what is starting";
  return "nothing, until the signals change";
}

function timeline(entries) {
  const columns = ["time", "pool", "wanted", "decided by", "action", "reason"];
  const rows = entries.map((one) =>
    el(
      "tr",
      {},
      el("td", {}, clock(one.at_unix_s)),
      el("td", {}, named(one)),
      el("td", {}, String(one.desired)),
      el("td", {}, one.cause),
      el("td", { class: "id" }, one.actions.join(", ") || "none"),
      el("td", { class: "reason" }, one.reason),
    ),
  );
  return table("Decisions so far", columns, rows, "timeline");
}
