// Asks for a snapshot every second and hands it to the parts of the page. Nothing is asked while it is hidden.

import { getJson, hasKey, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { number, offer, setText } from "./dom.js";
import { Figures } from "./figures.js";
import { Requests } from "./requests.js";
import { Scaling } from "./scaling.js";
import { Topology } from "./topology.js";

const EVERY_MS = 1000;
const byId = (id) => document.getElementById(id);
const figures = new Figures(byId);
const topology = new Topology(byId("pools"));
const scaling = new Scaling(byId("scaling"));
const requests = new Requests(byId("requests"));
const chat = new Chat(byId("chat"));
let model = null;

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value);
  byId("key").value = "";
  void admitted();
});
byId("model").addEventListener("change", (event) => {
  model = event.target.value;
});

// Whether there is a key to ask with; asks for one where there is none or a wrong one.
async function admitted() {
  const access = await getJson("page/access");
  byId("key-form").hidden = access.admitted || !access.asks_for;
  byId("main").hidden = !access.admitted;
  setText(byId("key-label"), access.asks_for === "api_key" ? "API key of an admin" : "Token of this page");
  setText(byId("key-error"), access.asks_for && hasKey() ? access.message : "");
  if (!access.admitted) setText(byId("status"), access.asks_for ? "Locked" : access.message);
  return access.admitted;
}

async function tick() {
  const snapshot = await getJson("page/snapshot");
  if (!figures.columns || !figures.add(snapshot.latest)) figures.replace(await getJson("page/history"));
  chooseModel(snapshot);
  topology.show(snapshot);
  figures.show(model, snapshot);
  scaling.show(snapshot.scaling);
  requests.show(snapshot.requests);
  const state = snapshot.draining ? "Shutting down" : "Live";
  setText(byId("status"), `${state}, version ${snapshot.version}, up ${duration(snapshot.uptime_s)}`);
  document.body.dataset.state = "live";
}

function chooseModel(snapshot) {
  const names = snapshot.models.map((one) => one.model);
  offer(byId("model"), names);
  byId("model-choice").hidden = names.length < 2;
  if (!names.includes(model)) model = names[0] ?? null;
  chat.offer(snapshot.servable);
}

function duration(seconds) {
  if (seconds < 120) return `${number(seconds)} s`;
  if (seconds < 7200) return `${number(seconds / 60)} min`;
  return `${number(seconds / 3600, 1)} h`;
}

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const shown = () =>
  document.hidden ? new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true })) : null;

async function run() {
  for (;;) {
    await shown();
    const began = performance.now();
    try {
      if (document.body.dataset.state === "live" || (await admitted())) await tick();
    } catch (error) {
      document.body.dataset.state = "lost";
      setText(byId("status"), `No answer, trying again: ${error.message}`);
    }
    await pause(Math.max(100, EVERY_MS - (performance.now() - began)));
  }
}

void run();
