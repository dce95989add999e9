// The kept requests: the latest, the slow and the failed ones, each as a waterfall.

import { el, milliseconds, table } from "./dom.js";
import { showRecord } from "./waterfall.js";

const KINDS = [
  ["recent", "Latest"],
  ["slow", "Slow"],
  ["failed", "Failed or refused"],
];

export class Requests {
  constructor(container) {
    this.kind = "recent";
    this.choices = KINDS.map(([kind, name]) =>
      el("button", { type: "button", "aria-pressed": String(kind === this.kind), onclick: () => this.choose(kind) }, name),
    );
    this.body = el("tbody");
    const columns = ["request", "received", "outcome", "TTFT", "in all"];
    this.record = el("div", { "aria-live": "polite" });
    container.replaceChildren(
      el("div", { class: "choices", role: "group", "aria-label": "Which requests" }, ...this.choices),
      table("Kept requests", columns, this.body),
      this.record,
    );
  }

  choose(kind) {
    this.kind = kind;
    KINDS.forEach(([name], index) => this.choices[index].setAttribute("aria-pressed", String(name === kind)));
    this.show(this.lists);
  }

  show(lists) {
    this.lists = lists;
    const found = lists?.[this.kind] ?? [];
    const shown = JSON.stringify([this.kind, found]);
    if (shown === this.shown) return;
    this.shown = shown;
    const focused = this.body.contains(document.activeElement) ? document.activeElement.textContent : null;
    const none = el("tr", {}, el("td", { colspan: 5 }, "none are kept"));
    this.body.replaceChildren(...(found.length ? found.map((one) => this.row(one)) : [none]));
    if (focused) [...this.body.querySelectorAll("button")].find((one) => one.textContent === focused)?.focus();
  }

  row(one) {
    const open = () => this.open(one.request_id);
    const button = el("button", { type: "button", class: "link id", onclick: open, title: one.kept_because.join("\n") }, one.request_id);
    const received = new Date(one.received).toLocaleTimeString("en-GB");
    return el(
      "tr",
      {},
      el("td", {}, button),
      el("td", {}, received),
      el("td", { class: one.outcome === "completed" ? "" : "bad" }, one.outcome),
      el("td", {}, milliseconds(one.ttft_ms)),
      el("td", {}, milliseconds(one.total_ms)),
    );
  }

  async open(id) {
    await showRecord(this.record, id);
    this.record.querySelector("h3")?.focus();
  }
}
