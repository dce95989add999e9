// A chat box: the answer as it streams, then the request's own waterfall.

import { chat } from "./api.js";
import { el, offer } from "./dom.js";
import { showRecord } from "./waterfall.js";

const MOST_TOKENS = 256;
const MOST_TURNS = 20;

export class Chat {
  constructor(container) {
    this.turns = [];
    this.log = el("div", { class: "log", role: "log", tabindex: 0, "aria-label": "Conversation" });
    this.text = el("textarea", { id: "prompt", rows: 2, required: true });
    this.text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey) {
        event.preventDefault();
        this.form.requestSubmit();
      }
    });
    this.button = el("button", { type: "submit" }, "Send");
    const again = el("button", { type: "button", onclick: () => this.clear() }, "New chat");
    this.form = el("form", {}, el("label", { for: "prompt" }, "Message (Enter sends)"), this.text, el("div", { class: "choices" }, this.button, again));
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.running.abort();
      else void this.send(this.text.value.trim());
    });
    this.record = el("div", { id: "chat-record" });
    this.select = el("select", { id: "chat-model" });
    this.choice = el("p", { hidden: true }, el("label", {}, "Model ", this.select));
    container.replaceChildren(this.choice, this.log, this.form, this.record);
  }

  // The models that can be asked, by name.
  offer(names) {
    offer(this.select, names);
    this.choice.hidden = names.length < 2;
  }

  clear() {
    this.running?.abort();
    this.turns = [];
    this.log.replaceChildren();
    this.record.replaceChildren();
    this.text.focus();
  }

  async send(content) {
    if (!content) return;
    this.text.value = "";
    this.turns = [...this.turns, { role: "user", content }].slice(-MOST_TURNS);
    this.log.append(el("p", { class: "user" }, content));
    const answer = el("p", { class: "assistant" });
    this.log.append(answer);
    this.running = new AbortController();
    this.button.textContent = "Stop";
    const id = `page-${crypto.getRandomValues(new Uint32Array(3)).reduce((text, part) => text + part.toString(16).padStart(8, "0"), "")}`;
    const body = { model: this.select.value, messages: this.turns, stream: true, max_tokens: MOST_TOKENS };
    try {
      await chat(body, id, this.running.signal, (event) => {
        answer.append(event.choices?.[0]?.delta?.content ?? "");
        this.log.scrollTop = this.log.scrollHeight;
      });
    } catch (error) {
      if (error.name !== "AbortError") this.log.append(el("p", { class: "bad" }, error.message));
    }
    this.running = null;
    this.button.textContent = "Send";
    if (answer.textContent) this.turns.push({ role: "assistant", content: answer.textContent });
    else answer.remove();
    await showRecord(this.record, id);
  }
}
