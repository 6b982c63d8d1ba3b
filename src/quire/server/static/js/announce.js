// What screen readers are told: an answer sentence by sentence, as it is written. The thread itself is drawn again and
// again while an answer grows, so it cannot be a live region: all of it would be read out each time.

import { h } from "./dom.js";
import { callsOf } from "./thread.js";

const PACE = 1500; // milliseconds between two announcements
const SENTENCE = /[\s\S]*(?:[.!?:]\s|\n)/;
const KEPT = 12; // announcements; the region is no second transcript

export class Announcer {
  constructor() {
    this.root = h("div", { class: "for-readers", id: "spoken", "aria-live": "polite", "aria-atomic": "false" });
    this.answer = null;
    this.said = 0;
    this.last = 0;
  }

  /** Say this now. */
  say(text) {
    this.root.append(h("p", {}, text));
    while (this.root.children.length > KEPT) this.root.firstChild.remove();
    this.last = performance.now();
  }

  /** An answer holds so much now: say the sentences that are complete. */
  follow(answer) {
    if (answer !== this.answer) {
      this.answer = answer;
      this.said = answer.content.length;
      this.say("The answer begins.");
    }
    if (answer.running && performance.now() - this.last < PACE) return;
    const rest = answer.content.slice(this.said);
    const text = answer.running ? (SENTENCE.exec(rest)?.[0] ?? "") : rest;
    this.said += text.length;
    if (text.trim()) this.say(text.trim());
    if (answer.running) return;
    this.answer = null;
    if (answer.error) return; // errors are alerts
    const called = callsOf(answer).map((call) => call.name);
    if (called.length) this.say(`The model calls ${called.join(", ")}. It goes on when it has the results.`);
    else this.say(answer.finish === "stopped" ? "Stopped." : "The answer is complete.");
  }
}
