// One request's record: where its time went, what was decided and why, what it cost.

import { getJson } from "./api.js";
import { bytes, el, milliseconds, number, table } from "./dom.js";

const COLORS = {
  admission: 3,
  reserve: 3,
  prefill_queue: 3,
  prefill_compute: 4,
  prefill: 6,
  transfer: 1,
  decode: 4,
};

// Shows a request's record, or why there is none.
export async function showRecord(container, id) {
  try {
    container.replaceChildren(waterfall(await getJson(`page/request/${encodeURIComponent(id)}`)));
  } catch (error) {
    container.replaceChildren(el("p", { class: "bad" }, error.message));
  }
}

// Two scales: phases until the first token, which may be short, and those after it, which may be long.
function waterfall(record) {
  const hasToken = record.ttft_ms !== null;
  const first = hasToken ? record.ttft_ms : record.total_ms;
  const end = Math.max(record.total_ms, ...record.phases.map((phase) => phase.end_ms));
  const before = record.phases.filter((phase) => phase.start_ms < first);
  const after = record.phases.filter((phase) => phase.start_ms >= first);
  const rows = [
    ...before.map((phase) => row(phase, 0, first)),
    ...(hasToken ? [el("tr", { class: "mark" }, el("th", { scope: "row", colspan: 5 }, `first token after ${milliseconds(first)}`))] : []),
    ...after.map((phase) => row(phase, first, end)),
  ];
  const columns = ["phase", "start", "time", "worker", "when"];
  return el(
    "article",
    { class: "record" },
    el("h3", { tabindex: -1 }, `Request ${record.request_id}`),
    el("p", {}, about(record)),
    record.failure ? el("p", { class: "bad" }, record.failure) : null,
    table("Phases of the request", columns, rows, "waterfall"),
    details(record),
  );
}

function row(phase, from, to) {
  const span = Math.max(to - from, 1e-9);
  const bar = el("span", { class: `bar c${COLORS[phase.name] ?? 7}` });
  bar.style.marginLeft = `${Math.min(99, (100 * (phase.start_ms - from)) / span)}%`;
  bar.style.width = `${Math.max(1, Math.min(100, (100 * (phase.end_ms - phase.start_ms)) / span))}%`;
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, phase.name),
    el("td", {}, milliseconds(phase.start_ms)),
    el("td", {}, milliseconds(phase.end_ms - phase.start_ms)),
    el("td", { class: "id" }, phase.worker),
    el("td", { class: "when" }, bar),
  );
}

function about(record) {
  const first = record.ttft_ms === null ? "no first token" : `TTFT ${milliseconds(record.ttft_ms)}`;
  const tokens = `${number(record.prompt_tokens)} prompt and ${number(record.output_tokens)} output tokens`;
  const pace = record.tpot_ms ? `, ${milliseconds(record.tpot_ms)} an output token` : "";
  return `${record.outcome}, ${first}, ${milliseconds(record.total_ms)} in all; model ${record.model || "not named"}, ${tokens}${pace}`;
}

function details(record) {
  const facts = record.attempts.map((attempt) => {
    const wrote = attempt.written_bytes
      ? `, wrote ${bytes(attempt.written_bytes)} over ${attempt.transport}${attempt.lane ? ` (${attempt.lane})` : ""}`
      : "";
    const failed = attempt.failure ? `, ${attempt.failed_worker} failed: ${attempt.failure}` : "";
    const pair = attempt.prefill_worker
      ? `${attempt.prefill_worker} to ${attempt.decode_worker || "no decode worker"}`
      : `${attempt.decode_worker} alone`;
    return `attempt ${attempt.number}: ${pair}${wrote}${failed}`;
  });
  const decided = record.decisions.map((one) => el("li", {}, el("b", {}, `${one.stage}: ${one.chosen} `), one.reason));
  const cost = record.cost;
  const spent = `prefill ${number(cost.prefill_seconds, 3)} s, decode ${number(cost.decode_seconds, 3)} s, ${number(cost.kv_block_seconds, 1)} KV block-seconds`;
  const kept = record.kept_because.map((why) => el("li", {}, `kept because ${why}`));
  return el(
    "details",
    {},
    el("summary", {}, "Decisions and cost"),
    el("ul", {}, ...facts.map((fact) => el("li", {}, fact)), ...decided, el("li", {}, `cost: ${spent}`), ...kept),
  );
}
