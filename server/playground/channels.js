// The channels of a chat's answer in harmony format, which gpt-oss has: tells text, reasoning and frame apart, by tokens
// as `completions/harmony.py` does. Knows no page.

/** Split token ids where `marks` has one, so that the text of each part has one channel. */
export function parts(ids, marks) {
  const found = [[]];
  for (const id of ids) {
    if (marks?.[id]) found.push([id], []);
    else found.at(-1).push(id);
  }
  return found.filter((part) => part.length);
}

export class Channels {
  #marks;
  #channel = "text";
  #header; // null: none is open

  /** `marks` are the special tokens of the frame, by id; null for an answer without channels. */
  constructor(marks) {
    this.#marks = marks ?? {};
    this.#header = marks ? "" : null; // the prompt of a chat ends within one
  }

  /** Return the channel of the next token: text, reasoning or frame. */
  of({ id, text }) {
    const mark = this.#marks[id];
    if (!mark && this.#header === null) return this.#channel;
    if (!mark) this.#header += text;
    else if (mark === "<|message|>") {
      this.#channel = /^\s*analysis\b/.test(this.#header) ? "reasoning" : "text";
      this.#header = null;
    } else if (mark === "<|end|>") [this.#channel, this.#header] = ["text", null];
    else this.#header = "";
    return "frame";
  }
}
