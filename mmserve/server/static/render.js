// Results as elements. Whatever a document or a model says is set as text, never as markup.

const MARK = /\[p\. (\d+)\]/g;

export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

/** Text in which each mark such as [p. 3] is a button. */
export function citedText(text, onPage) {
  const parts = [];
  let end = 0;
  for (const match of text.matchAll(MARK)) {
    parts.push(text.slice(end, match.index), citation(Number(match[1]), onPage));
    end = match.index + match[0].length;
  }
  return [...parts, text.slice(end)];
}

function citation(page, onPage) {
  const button = element("button", { type: "button", className: "cite", textContent: `p. ${page}` });
  button.setAttribute("aria-label", `Show page ${page}`);
  button.addEventListener("click", () => onPage(page));
  return button;
}

export function renderResult(result, onPage) {
  if (result.object === "extraction") return [valueTable(result.values, onPage)];
  if (result.object === "transcript") return [element("pre", { textContent: result.text })];
  return citedText(result.text, onPage);
}

function valueTable(values, onPage) {
  const head = element("tr", {}, ...["Field", "Value", "Pages"].map((name) => element("th", { textContent: name, scope: "col" })));
  const rows = values.map(({ path, value, pages }) =>
    element(
      "tr",
      {},
      element("th", { scope: "row", textContent: path.replace(/^\//, "").replaceAll("/", " › ") }),
      element("td", { textContent: value === null ? "not in the document" : String(value) }),
      element("td", {}, ...pages.flatMap((page) => [citation(page, onPage), " "])),
    ),
  );
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
}

/** A link that saves `text` under `filename`. */
export function download(label, filename, type, text) {
  const button = element("button", { type: "button", textContent: label });
  button.addEventListener("click", () => {
    const url = URL.createObjectURL(new Blob([text], { type }));
    element("a", { href: url, download: filename }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  });
  return button;
}

export function asMarkdown(result) {
  const text = result.object === "extraction" ? "```json\n" + JSON.stringify(result.data, null, 2) + "\n```" : result.text;
  const notes = (result.warnings ?? []).map((warning) => `> ${warning}`);
  return [`# ${result.name}`, "", text, "", ...notes, ""].join("\n");
}
