// The tokens of a completion: marked by how unlikely they were, each with its alternatives. Knows no requests but the one
// for the text of a token.
//
// A token is { id, text, logprob, top: [[id, logprob], ...] }; one that the user chose has `chosen`.
import { textOf } from "./api.js";
import { Channels } from "./channels.js";

const HIDE_MS = 200; // time for the pointer to reach the alternatives
const NAMES = { "": "end", " ": "space", "\n": "line break", "\n\n": "two line breaks", "\t": "tab" };

/** Return the tokens that a chunk of a stream adds. Text comes by offsets, in characters and not in UTF-16. */
export function tokensOf({ text, token_ids: ids, logprobs }) {
  const characters = [...text];
  const starts = logprobs.text_offset.map((offset) => offset - logprobs.text_offset[0]);
  return ids.map((id, i) => ({
    id,
    text: i === ids.length - 1 ? characters.slice(starts[i]).join("") : characters.slice(starts[i], starts[i + 1]).join(""),
    logprob: logprobs.token_logprobs[i],
    top: Object.entries(logprobs.top_logprobs[i]).map(([name, logprob]) => [Number(name.slice("token_id:".length)), logprob]),
  }));
}

/** Return how marked a token is, 0 for a certain one to 1: its surprise in bits over that of one in 256. */
function surprise(logprob) {
  return Math.min(1, -logprob / Math.log(256));
}

export function percent(logprob) {
  const value = 100 * Math.exp(logprob);
  return value >= 99.95 ? "100 %" : value >= 10 ? `${value.toFixed(0)} %` : value >= 0.1 ? `${value.toFixed(1)} %` : "<0.1 %";
}

export function visible(text) {
  return text.replace(/^ /, "␣").replace(/ $/, "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "∎";
}

export class TokenView {
  /** Show tokens in `output`, alternatives in `panel`; `choose(index, id)` is called when one is chosen. */
  constructor(output, panel, choose) {
    Object.assign(this, { output, panel, choose, tokens: [], open: null, hiding: 0 });
    this.clear();
    output.addEventListener("pointerover", (event) => event.pointerType === "mouse" && this.#show(event.target));
    output.addEventListener("pointerleave", () => this.#hideSoon());
    output.addEventListener("click", (event) => this.#show(event.target));
    output.addEventListener("focusin", (event) => this.#show(event.target));
    output.addEventListener("keydown", (event) => this.#onKey(event));
    panel.addEventListener("pointerenter", () => clearTimeout(this.hiding));
    panel.addEventListener("pointerleave", () => this.#hideSoon());
    panel.addEventListener("keydown", (event) => this.#onPanelKey(event));
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.hide());
    document.addEventListener("pointerdown", ({ target }) => panel.contains(target) || output.contains(target) || this.hide());
  }

  /** Begin anew; `marks` are those of the channels of the tokens to come. */
  clear(marks = null) {
    this.hide();
    this.tokens = [];
    this.channels = new Channels(marks);
    this.channel = null; // of the latest token that is shown
    this.output.replaceChildren();
  }

  add(token) {
    const span = document.createElement("span");
    const channel = this.channels.of(token);
    span.className = `token ${channel}`;
    span.hidden = channel === "frame";
    span.tabIndex = !span.hidden && this.channel === null ? 0 : -1;
    if (!span.hidden) {
      span.classList.toggle("begins", channel !== (this.channel ?? "text"));
      this.channel = channel;
    }
    span.classList.toggle("chosen", Boolean(token.chosen));
    span.classList.toggle("break", token.text.startsWith("\n"));
    span.textContent = token.text;
    span.setAttribute("role", "button");
    span.setAttribute("aria-haspopup", "dialog");
    span.style.setProperty("--surprise", surprise(token.logprob).toFixed(3));
    if (!token.text.trim()) span.setAttribute("aria-label", NAMES[token.text] ?? "blank");
    this.tokens.push({ ...token, channel });
    this.output.append(span);
  }

  /** Mark the last token as the end of the text, where it has none of its own. */
  end() {
    const last = this.output.lastElementChild;
    if (last && !last.textContent) last.textContent = " ∎";
  }

  /** The text without reasoning and frame. */
  get text() {
    return this.tokens.filter((token) => token.channel === "text").map((token) => token.text).join("");
  }

  hide() {
    clearTimeout(this.hiding);
    this.panel.hidden = true;
    this.open?.classList.remove("open");
    this.open = null;
  }

  #hideSoon() {
    clearTimeout(this.hiding);
    this.hiding = setTimeout(() => this.panel.contains(document.activeElement) || this.hide(), HIDE_MS);
  }

  #show(span) {
    clearTimeout(this.hiding);
    if (!span.classList.contains("token") || span === this.open) return;
    const index = [...this.output.children].indexOf(span);
    if (!this.tokens[index].top.length) return;
    this.hide();
    this.open = span;
    span.classList.add("open");
    this.panel.replaceChildren(...this.tokens[index].top.map(([id, logprob]) => this.#row(index, id, logprob)));
    this.panel.hidden = false;
    this.#place(span);
  }

  #row(index, id, logprob) {
    const row = document.createElement("button");
    const [name, share] = [document.createElement("code"), document.createElement("span")];
    row.type = "button";
    row.append(name, share);
    name.textContent = "…";
    share.textContent = percent(logprob);
    row.style.setProperty("--share", Math.exp(logprob).toFixed(4));
    if (id === this.tokens[index].id) row.setAttribute("aria-current", "true");
    row.addEventListener("click", () => this.choose(index, id, logprob));
    textOf(id).then((text) => (name.textContent = visible(text)), () => (name.textContent = `token ${id}`));
    return row;
  }

  /** Put the panel below its token, within the sheet. */
  #place(span) {
    const sheet = this.panel.parentElement.getBoundingClientRect();
    const at = span.getClientRects()[0] ?? span.getBoundingClientRect();
    const left = Math.max(0, Math.min(at.left - sheet.left, sheet.width - this.panel.offsetWidth));
    this.panel.style.left = `${left}px`;
    this.panel.style.top = `${at.bottom - sheet.top}px`;
  }

  #onKey(event) {
    const spans = [...this.output.children].filter((span) => !span.hidden);
    const index = spans.indexOf(event.target);
    const target = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: spans.length - 1 }[event.key];
    if (spans[target]) {
      event.target.tabIndex = -1;
      spans[target].tabIndex = 0;
      spans[target].focus();
    } else if (event.key === "Enter" || event.key === " " || event.key === "ArrowDown") {
      this.#show(event.target);
      this.panel.firstElementChild?.focus();
    } else return;
    event.preventDefault();
  }

  #onPanelKey(event) {
    const at = document.activeElement;
    const target = { ArrowDown: at.nextElementSibling, ArrowUp: at.previousElementSibling }[event.key];
    if (event.key === "Escape" || event.key === "Tab") {
      const span = this.open;
      this.hide();
      span?.focus();
      this.hide();
    } else if (target) target.focus();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}
