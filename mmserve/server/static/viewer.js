// One page of a document, large: opened by a citation or a thumbnail, leafed through with the arrow keys. A text file
// has no pages to draw and is shown as it is.

import { getText, pictureUrl } from "./api.js";

const WIDTH = 1400;
const dialog = document.getElementById("viewer");
const title = document.getElementById("viewer-title");
const picture = document.getElementById("viewer-picture");
const text = document.getElementById("viewer-text");
const problem = document.getElementById("viewer-error");
const previous = document.getElementById("viewer-previous");
const next = document.getElementById("viewer-next");

let shown = null;
let loading = new AbortController();

export function hasPictures(file) {
  return !file.media_type.startsWith("text/");
}

export function openPage(file, number) {
  shown = { file, number };
  if (!dialog.open) dialog.showModal();
  draw();
}

async function draw() {
  const { file, number } = shown;
  loading.abort();
  loading = new AbortController();
  const { signal } = loading;
  const isDrawn = hasPictures(file);
  title.textContent = isDrawn ? `${file.filename}, page ${number} of ${file.num_pages}` : file.filename;
  previous.disabled = !isDrawn || number <= 1;
  next.disabled = !isDrawn || number >= file.num_pages;
  problem.textContent = "";
  try {
    if (!isDrawn) {
      release();
      text.textContent = await getText(`v1/files/${file.id}/content`, signal);
      return;
    }
    const url = await pictureUrl(`v1/files/${file.id}/pages/${number}?width=${WIDTH}`, signal);
    if (signal.aborted) return URL.revokeObjectURL(url);
    release();
    picture.src = url;
    picture.alt = title.textContent;
    picture.hidden = false;
  } catch (error) {
    if (error.name === "AbortError") return;
    release();
    problem.textContent = error.message;
  }
}

function release() {
  if (picture.src) URL.revokeObjectURL(picture.src);
  picture.removeAttribute("src");
  picture.hidden = true;
  text.textContent = "";
}

function leaf(step) {
  const number = shown.number + step;
  if (!hasPictures(shown.file) || number < 1 || number > shown.file.num_pages) return;
  shown = { ...shown, number };
  draw();
}

previous.addEventListener("click", () => leaf(-1));
next.addEventListener("click", () => leaf(1));
document.getElementById("viewer-close").addEventListener("click", () => dialog.close());
dialog.addEventListener("keydown", (event) => {
  if (event.key === "ArrowLeft") leaf(-1);
  if (event.key === "ArrowRight") leaf(1);
});
dialog.addEventListener("close", () => {
  loading.abort();
  release();
});
