// One document: its pages, the job that works on it, and what came of it.

import { getJson, jobEvents, pictureUrl, postJson, request } from "./api.js";
import { asMarkdown, citedText, download, element, renderResult } from "./render.js";
import { hasPictures, openPage } from "./viewer.js";

const THUMBNAIL_WIDTH = 160;
const MAX_THUMBNAILS = 40;
const template = document.getElementById("card-template");
/** All cards that have a document: deleting it ends each of them. */
const cards = new Set();
const DOING = { summarize: "Summarising", ask: "Looking for the answer", extract: "Extracting", transcribe: "Transcribing" };

export class Card {
  /** `order` is `{task, options}`. */
  constructor(name, order) {
    this.name = name;
    this.order = order;
    this.file = null;
    this.jobId = null;
    this.text = "";
    this.leaving = new AbortController();
    this.root = template.content.firstElementChild.cloneNode(true);
    this.title = this.find("h2");
    this.title.textContent = name;
    this.title.id = `card-${crypto.getRandomValues(new Uint32Array(1))[0]}`;
    this.root.setAttribute("aria-labelledby", this.title.id);
    this.find("footer").hidden = true;
    this.find(".cancel").addEventListener("click", () => this.cancel());
    this.find(".delete").addEventListener("click", () => this.delete());
    this.find(".again").addEventListener("submit", (event) => this.askAgain(event));
  }

  find(selector) {
    return this.root.querySelector(selector);
  }

  /** From `upload`, which resolves to a stored file, to the result. Never throws: the card says what went wrong. */
  async run(upload) {
    try {
      this.say("Uploading…");
      this.file = await upload();
      cards.add(this);
      this.showThumbnails();
      const { task, options } = this.order;
      this.jobId = (await postJson("v1/jobs", { task, file_ids: [this.file.id], options })).id;
      this.say("Waiting for its turn…");
      for await (const event of jobEvents(this.jobId, this.leaving.signal)) this.take(event);
    } catch (error) {
      this.fail(error.message);
    }
    this.find("footer").hidden = this.file === null;
  }

  take(event) {
    if (event.type === "progress") this.showProgress(event);
    else if (event.type === "delta") this.showText(this.text + event.text);
    else if (event.type === "result") this.showResult(event.result);
    else if (event.type === "error") this.fail(event.error.message);
    else if (event.type === "done") this.end(event.status);
  }

  showProgress(event) {
    const bar = this.find("progress");
    // After a restart of the server the text may come out otherwise, and begins anew.
    if (event.event === "restarted") this.showText("");
    if (event.event === "document_opened") bar.max = Math.max(event.num_pages, 1);
    if (event.event === "page_read") {
      bar.max = Math.max(event.num_pages, 1);
      bar.value = event.num_read;
      this.say(`Read page ${event.num_read} of ${event.num_pages}`);
    }
    if (event.event === "request_submitted") this.say(`${DOING[this.order.task]}…`);
  }

  showText(text) {
    this.text = text;
    const shown = this.order.task === "transcribe" ? [element("pre", { textContent: text })] : this.cited(text);
    this.find(".answer").replaceChildren(...shown);
  }

  cited(text) {
    return citedText(text, (page) => openPage(this.file, page));
  }

  showResult(result) {
    this.find(".answer").replaceChildren(...renderResult(result, (page) => openPage(this.file, page)));
    this.find(".warnings").replaceChildren(...result.warnings.map((text) => element("li", { textContent: text })));
    const base = this.name.replace(/\.[^.]*$/, "") || "result";
    this.find(".downloads").replaceChildren(
      download("Download JSON", `${base}.json`, "application/json", JSON.stringify(result, null, 2) + "\n"),
      download("Download Markdown", `${base}.md`, "text/markdown", asMarkdown(result)),
    );
    if (result.cached) this.wasCached = true;
  }

  end(status) {
    const words = { done: this.wasCached ? "Done: known from before" : "Done", cancelled: "Cancelled", failed: "Failed" };
    this.say(words[status] ?? status);
    this.find(".cancel").hidden = true;
    this.find("progress").hidden = true;
  }

  fail(sentence) {
    this.find(".error").textContent = sentence;
    this.end("failed");
  }

  say(text) {
    this.find(".progress").textContent = text;
  }

  async cancel() {
    this.find(".cancel").disabled = true;
    if (this.jobId === null) return this.fail("Cancelled before the upload was complete.");
    try {
      const job = await request(`v1/jobs/${this.jobId}`, { method: "DELETE" });
      this.end((await job.json()).status ?? "cancelled");
    } catch (error) {
      this.find(".error").textContent = error.message;
      this.find(".cancel").disabled = false;
    }
  }

  /** The document goes with the results of all cards that have it, questions that were asked again included. */
  async delete() {
    const sharing = [...cards].filter((card) => card.file.id === this.file.id);
    const results = sharing.length === 1 ? "its result" : `its ${sharing.length} results`;
    if (!confirm(`Delete ${this.file.filename} and ${results} from the server? This cannot be undone.`)) return;
    try {
      for (const card of sharing) await card.deleteJob();
      await request(`v1/files/${this.file.id}`, { method: "DELETE" }).catch(ignoreGone);
      for (const card of sharing) card.remove();
    } catch (error) {
      this.find(".error").textContent = error.message;
    }
  }

  async deleteJob() {
    if (this.jobId === null) return;
    try {
      const path = `v1/jobs/${this.jobId}`;
      const { deleted } = await getJson(path, { method: "DELETE" });
      // A job that had not ended was cancelled by this; now it can be removed.
      if (!deleted) await request(path, { method: "DELETE" });
    } catch (error) {
      ignoreGone(error);
    }
  }

  remove() {
    cards.delete(this);
    this.leaving.abort();
    this.root.remove();
  }

  /** A question about the same document is a card of its own, just above. */
  askAgain(event) {
    event.preventDefault();
    const input = event.target.elements.question;
    const question = input.value.trim();
    if (!question) return;
    input.value = "";
    const card = new Card(`${this.file.filename}: ${question}`, { task: "ask", options: { question } });
    this.root.before(card.root);
    card.title.tabIndex = -1;
    card.title.focus();
    card.run(() => getJson(`v1/files/${this.file.id}`));
  }

  async showThumbnails() {
    const list = this.find(".pages");
    list.hidden = !hasPictures(this.file);
    if (list.hidden) return;
    for (let number = 1; number <= Math.min(this.file.num_pages, MAX_THUMBNAILS); number += 1) {
      list.append(element("li", {}, this.thumbnail(number)));
    }
    for (const button of list.querySelectorAll("button")) {
      try {
        const path = `v1/files/${this.file.id}/pages/${button.dataset.page}?width=${THUMBNAIL_WIDTH}`;
        const picture = element("img", { src: await pictureUrl(path, this.leaving.signal), alt: "" });
        picture.addEventListener("load", () => URL.revokeObjectURL(picture.src), { once: true });
        button.firstElementChild.replaceWith(picture);
      } catch {
        // A page without a picture keeps its empty frame; the answer says what was wrong with it.
      }
    }
  }

  thumbnail(number) {
    const frame = element("span", { className: "blank" });
    const button = element("button", { type: "button" }, frame, `${number}`);
    button.dataset.page = number;
    button.setAttribute("aria-label", `Show page ${number}`);
    button.addEventListener("click", () => openPage(this.file, number));
    return button;
  }
}

function ignoreGone(error) {
  if (error.status !== 404) throw error;
}
